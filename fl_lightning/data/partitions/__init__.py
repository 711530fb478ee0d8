"""Partitions: functions from labels to one shard of examples per client."""
