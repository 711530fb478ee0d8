"""Training over a real network, through Flower."""
