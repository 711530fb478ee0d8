"""Costs of architectures: multiply-adds, parameters, activations, latencies."""
