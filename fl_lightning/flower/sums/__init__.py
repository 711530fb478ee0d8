"""Hidden sums over a network: secure ones, a message round for every stage, and encrypted ones."""
