"""Spaces of architectures and their networks, a file each, of plain or of elastic layers."""
