"""Ops on rows: norms, activations, embeddings, sums."""
