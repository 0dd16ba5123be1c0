"""OpenAI's files and batches over a bounded folder (see README.md)."""
