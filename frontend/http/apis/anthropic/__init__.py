"""Anthropic's messages, served by the code of chat completions."""
