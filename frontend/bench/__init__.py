"""`headrace bench`: load generators, in-process benchmarks, and what reads their results."""
