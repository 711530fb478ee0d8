"""Spaces of architectures, a file each."""
