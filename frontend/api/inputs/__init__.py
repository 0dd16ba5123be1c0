"""Prompts in every form that callers give them."""
