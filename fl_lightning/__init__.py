"""Federated learning for PyTorch Lightning."""
