"""Masks: files, densities, and the parameters that may be masked."""
