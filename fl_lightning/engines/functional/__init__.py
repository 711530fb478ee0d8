"""A module's training step as a pure function of its parameters."""
