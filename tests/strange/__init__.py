"""Odd but legal modules, each trained by every engine and by a plain loop."""

from strange import (
    client_state,
    data_forms,
    data_of_lengths,
    hooks,
    layers,
    losses,
    optimizers,
    own_draws,
    python_state,
    rebound,
    sequence_layers,
)
from strange.rows import ROWS as TABLE

__all__ = [
    "TABLE",
    "client_state",
    "data_forms",
    "data_of_lengths",
    "hooks",
    "layers",
    "losses",
    "optimizers",
    "own_draws",
    "python_state",
    "rebound",
    "sequence_layers",
]
