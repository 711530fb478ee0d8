"""Odd but legal modules, each trained by every engine and by a plain loop."""

from strange import losses
from strange.rows import ROWS as TABLE

__all__ = ["TABLE", "losses"]
