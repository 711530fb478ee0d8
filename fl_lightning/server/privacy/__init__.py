"""Differential privacy of clients: mechanisms, their noise, and what they cost."""
