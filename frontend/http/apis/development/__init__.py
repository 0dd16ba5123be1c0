"""vLLM's development routes."""
