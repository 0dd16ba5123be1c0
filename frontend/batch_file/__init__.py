"""OpenAI's batch files: reading, running and writing them."""
