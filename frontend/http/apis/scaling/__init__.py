"""vLLM's routes that change the number of engines."""
