"""A module's steps on one client's batches, and everything put back."""
