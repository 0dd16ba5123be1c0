"""The public forms of a prompt, under vLLM's module name."""

from headrace.frontend.api.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
