"""Floor 4: what is watched while rounds go by."""
