"""Calibration of a mask from scores: plans, densities, rules."""
