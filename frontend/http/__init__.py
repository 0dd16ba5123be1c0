"""The OpenAI-compatible HTTP server: a thin frontend process. No torch, transformers or numpy. See docs/server.md."""
