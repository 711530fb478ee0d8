"""Means of clients' updates."""
