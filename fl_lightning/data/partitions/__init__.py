"""Whose examples are whose: functions from labels to shards."""
