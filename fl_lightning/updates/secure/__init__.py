"""Updates that the server cannot read: secure sums and homomorphic encryption."""
