"""Server optimizers that torch does not have."""
