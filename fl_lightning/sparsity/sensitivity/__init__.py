"""Scores of a model's entries: Fisher information and other sensitivities."""
