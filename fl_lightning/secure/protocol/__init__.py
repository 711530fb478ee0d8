"""Secure sums: the messages of clients and server, from keys to unmasking."""
