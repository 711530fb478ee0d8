"""Configurations that make no sense, refused with a sentence."""
