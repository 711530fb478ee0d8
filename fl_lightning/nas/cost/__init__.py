"""What architectures cost: multiply-adds, parameters, activations."""
