"""Rounds inside Lightning's fit loop."""
