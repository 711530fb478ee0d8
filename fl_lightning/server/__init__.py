"""Floor 3: from many updates to a model."""
