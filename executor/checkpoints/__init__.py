"""Checkpoints on disk and on hubs: configs, tokenizers and weights, in every format that is read."""
