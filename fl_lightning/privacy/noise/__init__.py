"""Noise in whole steps of a grid."""
