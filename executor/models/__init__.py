"""Models described as data (specs, families, blocks), the eager decoder that computes them, and the KV cache."""
