"""The state that a client begins with: buffers, frozen tensors, Python's attributes."""
