"""Searches among architectures that train nothing: problems, strategies, scores, findings."""
