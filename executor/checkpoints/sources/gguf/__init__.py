"""Reads GGUF files: header, config, tokenizer and weights."""
