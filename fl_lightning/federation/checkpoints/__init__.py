"""What a run keeps to go on from."""
