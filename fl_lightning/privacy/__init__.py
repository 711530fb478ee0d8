"""Differential privacy: mechanisms, their noise, and accounting of ε."""
