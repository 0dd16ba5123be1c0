"""Adapters (LoRA) of a rank: their files, and what they add to the matrices that the model's blocks declare."""
