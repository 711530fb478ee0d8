"""What a run says: before its first round, in every round, at its end, and in its log file."""
