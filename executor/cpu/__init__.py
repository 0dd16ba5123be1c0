"""A rank on the CPU: the compiled program, packed weights, the batch and the runner."""
