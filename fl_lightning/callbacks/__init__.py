"""Floor 5: what is watched while rounds go by."""
