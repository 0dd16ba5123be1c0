"""Cohere's API: embeddings."""
