"""A rank on the CPU: the compiled program, packed weights, the batch state and the model runner."""
