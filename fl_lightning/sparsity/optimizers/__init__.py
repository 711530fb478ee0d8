"""Optimizers that step on active entries alone."""
