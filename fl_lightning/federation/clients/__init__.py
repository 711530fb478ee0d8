"""Training the clients of a fit: one after the other in the module, or many at once in slots."""
