"""Callbacks that watch rounds."""
