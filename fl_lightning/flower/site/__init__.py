"""A site: it follows the orders of the server with a Trainer of its own, and keeps its data."""
