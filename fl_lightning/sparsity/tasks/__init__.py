"""Task vectors: their files, sums and similarity."""
