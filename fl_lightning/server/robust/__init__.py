"""Robust aggregation rules: they tolerate a number of malicious clients."""
