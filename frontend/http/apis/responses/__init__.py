"""OpenAI's Responses API, served by the code of chat completions (see README.md)."""
