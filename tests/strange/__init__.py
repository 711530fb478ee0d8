"""Odd but legal modules, each trained by every engine and by a plain loop."""

from strange import (
    batch_features,
    batch_gradients,
    batch_losses,
    batch_terms,
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
    "batch_features",
    "batch_gradients",
    "batch_losses",
    "batch_terms",
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
