"""A run in several processes: who trains what, and how results meet."""
