"""Attacks that bound ε from below, and attacks on messages."""
