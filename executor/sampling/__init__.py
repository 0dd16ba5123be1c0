"""Sampling on the host: from logits to tokens, and the random numbers for it."""
