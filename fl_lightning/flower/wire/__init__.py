"""Orders and answers as bytes: written in one form, and checked when they are read."""
