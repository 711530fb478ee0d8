"""Masks calibrated on clients' data while a run begins, and again."""
