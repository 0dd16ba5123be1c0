"""Ollama's API, served by the code of chat completions."""
