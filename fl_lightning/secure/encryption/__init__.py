"""Homomorphic encryption: CKKS and Paillier."""
