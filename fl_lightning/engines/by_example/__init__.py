"""Proofs that a step is a mean over its batch's examples."""
