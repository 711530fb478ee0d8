"""Measurements against bare PyTorch, each printed by a command."""
