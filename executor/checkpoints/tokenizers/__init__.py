"""Tokenizers of checkpoints, in the one form that frontends read. See README.md."""
