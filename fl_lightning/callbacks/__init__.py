"""What is watched while rounds go by."""
