"""Optimizers that move only the active entries of a mask."""
