"""Requests as users give them: prompts, parameters and outputs, checked with errors in the user's terms."""
