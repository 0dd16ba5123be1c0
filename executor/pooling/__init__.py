"""Vectors of hidden states: see README.md."""
