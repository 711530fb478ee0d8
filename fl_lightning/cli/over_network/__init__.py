"""The command ``fl-lightning network``, and the two fits that it starts."""
