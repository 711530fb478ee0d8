"""Compiled training steps and other speedups of a single client's step."""
