"""Searches without training: problems, strategies, scores, findings."""
