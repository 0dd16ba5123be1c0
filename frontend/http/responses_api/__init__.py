"""OpenAI's Responses API, answered by the chat's own code (see README.md)."""
