"""Cohorts: samplers of the clients of a round."""
