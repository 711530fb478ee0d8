"""Which parameters may move."""
