"""The networks of spaces of sizes, whole or elastic."""
