"""Checkpoints, and how runs resume from them."""
