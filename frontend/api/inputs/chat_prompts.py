"""A conversation's prompt, as `LLM.chat` and `AsyncLLM.chat` make it from the same arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.api.inputs.prompts import Prompt
from headrace.frontend.api.unsupported import ARGUMENTS, check_arguments
from headrace.frontend.text.chat_template import complete_message
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.text.chat_template import Message
    from headrace.frontend.text.tokenizer import Tokenizer


def chat_prompt(tokenizer: Tokenizer, conversation: Sequence[Message], options: dict[str, Any]) -> Prompt:
    """`options` are what `chat_options` gives. Raises InvalidRequestError."""
    if isinstance(conversation, Sequence) and all(isinstance(message, Mapping) for message in conversation):
        conversation = [complete_message(message, f"messages[{at}]") for at, message in enumerate(conversation)]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    # The template writes the special tokens itself.
    return Prompt(text=text, token_ids=tokenizer.encode(text, add_special_tokens=False))


def chat_options(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of apply_chat_template for those of `chat`. Raises InvalidRequestError for an unknown one."""
    known = (
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_content_format"),
        *("tools", "documents"),
    )
    others = {name: value for name, value in given.items() if name not in (*known, "chat_template_kwargs")}
    if unknown := [name for name in others if name not in ARGUMENTS]:
        raise InvalidRequestError(
            f"chat has no argument {unknown[0]!r}; its arguments are {', '.join(known)}, chat_template_kwargs, "
            "tool_call_parser and reasoning_parser"
        )
    check_arguments("chat", others)
    options = {name: given[name] for name in known if given.get(name) is not None}
    options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
    return {**(given.get("chat_template_kwargs") or {}), **options}
