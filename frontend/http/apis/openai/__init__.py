"""OpenAI's completions and chat completions: requests, how they run, and responses."""
