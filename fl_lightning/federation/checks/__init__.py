"""Checks that reject conflicting settings before a fit starts."""
