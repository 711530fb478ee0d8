"""Steps of a module on one client's batches, after which everything is restored."""
