"""Adapters (LoRA) of an engine: which are registered, which are in memory, and who waits for one."""
