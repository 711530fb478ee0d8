"""Training of a network of all sizes: methods, budgets of clients, evaluation of sub-networks."""
