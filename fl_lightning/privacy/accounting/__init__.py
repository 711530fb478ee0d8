"""Accounting: ε of a number of rounds."""
