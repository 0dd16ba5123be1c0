"""OpenAI's completions and chat: what is asked for, how it runs, what is answered."""
