"""Heads fitted in closed form or by a few steps, before calibration."""
