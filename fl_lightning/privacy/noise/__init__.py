"""Noise as integer steps of a grid."""
