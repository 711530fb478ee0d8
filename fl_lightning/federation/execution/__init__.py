"""Which engine trains a cohort, tried and checked."""
