"""Masks: what may move, their files, their counts and pictures."""
