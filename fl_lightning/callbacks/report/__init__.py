"""A run's report: what is kept of every round, and the page that is made of it."""
