"""Renders a conversation into a prompt, for `LLM.chat` and `AsyncLLM.chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.embedded_parts import splice, without_parts
from headrace.frontend.request.lists import elements
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.chat_template import complete_message
from headrace.frontend.text.instructions import place_instructions
from headrace.frontend.text.template_renderer import one_limit
from headrace.frontend.vllm.unsupported import ARGUMENTS, check_arguments, no_argument
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.text.chat_template import Message
    from headrace.frontend.text.tokenizer import Tokenizer
    from headrace.ipc.messages import Welcome


def chat_prompt(
    tokenizer: Tokenizer, conversation: Sequence[Message], options: dict[str, Any], welcome: Welcome
) -> Prompt:
    """The rendered and tokenised conversation. options: from `chat_options`. Raises InvalidRequestError."""
    (prompt,) = chat_prompts(tokenizer, [conversation], options, welcome)
    return prompt


def chat_prompts(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Message]], options: dict[str, Any], welcome: Welcome
) -> list[Prompt]:
    """`chat_prompt` for several conversations."""
    placed, embeds = [], []
    for conversation in conversations:
        listed = elements(conversation) or conversation
        taken, parts = without_parts(listed, welcome) if isinstance(listed, Sequence) else (listed, [])
        embeds.append(parts)
        with one_limit():
            placed.append(_placed(tokenizer, taken, options))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

    prompts = []
    for text, parts in zip(tokenizer.render_chats(placed, **options), embeds, strict=True):
        token_ids, inputs = splice(text, parts, tokenizer, encode) if parts else (encode(text), ())
        prompts.append(Prompt(text=text, token_ids=token_ids, inputs=inputs))
    return prompts


def _placed(tokenizer: Tokenizer, conversation: Sequence[Message], options: dict[str, Any]) -> Sequence[Message]:
    """The conversation with its instructions where the template shows them. Raises InvalidRequestError."""

    def rendered(conversation: Sequence[Message]) -> str:
        (text,) = tokenizer.render_chats([conversation], **options)
        return text

    conversation = elements(conversation) or conversation
    if not isinstance(conversation, Sequence) or not all(isinstance(message, Mapping) for message in conversation):
        return conversation  # render_chats refuses it with a reason
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    checked = [_checked(message, f"messages[{at}]") for at, message in enumerate(conversation)]
    return place_instructions(template, checked, rendered)


def chat_options(given: dict[str, Any]) -> dict[str, Any]:
    """Converts arguments of `chat` into those of apply_chat_template. Raises InvalidRequestError for an unknown one."""
    known = (
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_content_format"),
        *("tools", "documents"),
    )
    others = {name: value for name, value in given.items() if name not in (*known, "chat_template_kwargs")}
    if unknown := [name for name in others if name not in ARGUMENTS]:
        others_are = (
            f"; its arguments are {', '.join(known)}, chat_template_kwargs, tool_call_parser and reasoning_parser"
        )
        raise no_argument("chat", unknown[0], others[unknown[0]], others_are)
    check_arguments("chat", others)
    template, variables = given.get("chat_template"), given.get("chat_template_kwargs")
    if not isinstance(template, str | None):
        raise InvalidRequestError(f"chat_template must be a text, not {type(template).__name__}")
    if not isinstance(variables, Mapping | None) or not all(isinstance(name, str) for name in variables or ()):
        raise InvalidRequestError(
            f"chat_template_kwargs must be a dict of values by their names, not {variables!r:.100}"
        )
    _check_tools(given.get("tools"))
    options = {name: given[name] for name in known if given.get(name) is not None}
    options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
    return {**(variables or {}), **options}


def _checked(message: Message, where: str) -> dict[str, Any]:
    """The message as templates expect it (`complete_message`). An object as content is passed on, for templates that
    support one. Raises InvalidRequestError."""
    lists = {name: elements(message.get(name)) for name in ("content", "tool_calls")}
    message = {**message, **{name: value for name, value in lists.items() if value is not None}}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str | None):
        raise InvalidRequestError(f"{where}.role must be a text, not {role!r:.100}")
    if not isinstance(content, str | Sequence | Mapping | None) or isinstance(content, bytes):
        raise InvalidRequestError(f"{where}.content must be a text or a list of parts, not {content!r:.100}")
    return complete_message(message, where)


def _check_tools(tools: Any) -> None:
    """Checks tools of OpenAI's shape by the server's rules; others are passed on, for templates that support them.
    Raises InvalidRequestError."""
    if not isinstance(tools, Sequence) or not all(isinstance(each, Mapping) for each in tools):
        return  # render_chat refuses it with a reason
    if any("function" in each or each.get("type") == "function" for each in tools):
        from headrace.frontend.text.formats.output_formats import wrong_tool

        if (wrong := wrong_tool(tools)) is not None:
            raise InvalidRequestError(wrong[1])
