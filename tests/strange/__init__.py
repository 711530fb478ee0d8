"""Odd but legal modules, each trained by every engine and by a plain loop."""

from importlib import import_module

from strange.rows import ROWS as TABLE

__all__ = ["TABLE"]

for family in (
    *("client_state", "data_forms", "data_of_lengths", "hooks", "layers", "losses"),
    *("optimizers", "own_draws", "python_state", "rebound", "sequence_layers"),
):
    import_module(f"strange.{family}")
