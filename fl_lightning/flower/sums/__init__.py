"""Secure sums over a network: a message round for every stage of the protocol."""
