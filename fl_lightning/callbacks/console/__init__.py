"""Console output of a run: before its first round, in every round, at its end, and in its log file."""
