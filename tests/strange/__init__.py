"""Odd but legal modules, each trained by every engine and by a plain loop."""

from strange import batch_terms, data_forms, hooks, layers, losses, optimizers, python_state
from strange.rows import ROWS as TABLE

__all__ = [
    "TABLE",
    "batch_terms",
    "data_forms",
    "hooks",
    "layers",
    "losses",
    "optimizers",
    "python_state",
]
