"""Architecture search: spaces, relaxations, elastic layers, searches, costs, the supernet."""
