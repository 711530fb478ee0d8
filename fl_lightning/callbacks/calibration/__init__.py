"""Calibration of masks on clients' data, at the start of a run or repeatedly."""
