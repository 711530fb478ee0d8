"""Spaces of architectures and their networks, one file each."""
