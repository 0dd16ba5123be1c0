"""The Python API under vLLM's names: `LLM`, `AsyncLLM`, `SamplingParams`, outputs."""
