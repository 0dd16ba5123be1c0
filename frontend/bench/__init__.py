"""`headrace bench`: load generators, in-process benchmarks, and tools that read their results."""
