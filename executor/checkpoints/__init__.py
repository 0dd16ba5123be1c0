"""Reads checkpoints from disk and from hubs: configs, tokenizers and weights, in all supported formats."""
