"""Floor 2: one client's work."""
