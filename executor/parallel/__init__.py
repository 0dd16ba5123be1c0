"""Ranks that share one model: their places, collectives, padding and pipeline stages."""
