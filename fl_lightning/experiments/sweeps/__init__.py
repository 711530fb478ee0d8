"""Hyper-parameter search: many trials of one configuration, with options of it varied."""
