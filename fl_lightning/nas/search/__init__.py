"""Searches that sample architectures, a file each."""
