"""From a conversation to the prompt that the model's template makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.frontend.http.errors import ApiError, bad_field
from headrace.frontend.http.requests import UNREAD_IN_MESSAGES, ChatMessage
from headrace.frontend.text.chat_template import render_chat, text_parts
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError, OptionError

_RESERVED = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


class ChatPromptRequest(Protocol):
    """The part of a request that says how a conversation becomes a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


def load_template(option: str | None) -> str | None:
    """The option chat_template: a file's content where there is one, else a template. Raises OptionError."""
    if option is None:
        return None
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template={option}: neither a template nor a file that can be read ({error})") from None


class ChatPrompts:
    """Renders conversations with the server's template, the model's, or (where trusted) the request's."""

    def __init__(self, template: str | None, *, trusts_requests: bool) -> None:
        self._template, self._trusts_requests = template, trusts_requests

    def render(
        self,
        request: ChatPromptRequest,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer | None,
        *,
        tool_choice: str | dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. Raises ApiError, and InvalidRequestError with the template's own words."""
        if tokenizer is None:
            raise bad_field("messages", "this engine runs without a tokenizer: use /v1/completions with token ids")
        if not messages:
            raise bad_field("messages", "messages is empty: give at least one")
        tools = self._tools(request.tools, tool_choice)
        variables = dict(request.chat_template_kwargs or {})
        if enable_thinking is not None:
            variables.setdefault("enable_thinking", enable_thinking)
        for name in variables:
            if name in _RESERVED:
                raise bad_field(
                    "chat_template_kwargs", f"chat_template_kwargs.{name} is a field of the request: give it there"
                )
        continues = bool(request.continue_final_message)
        begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        named = self._choose_template(request.chat_template, tokenizer)
        template = tokenizer.get_chat_template(named, tools)
        return render_chat(
            template,
            [_plain(message, index) for index, message in enumerate(messages)],
            add_generation_prompt=begins,
            continue_final_message=continues,
            tools=tools,
            documents=documents,
            variables={**tokenizer.special_tokens_map, **variables},
        )

    def _choose_template(self, asked: str | None, tokenizer: Tokenizer) -> str | None:
        if asked is None:
            return self._template
        if not self._trusts_requests and asked not in tokenizer.chat_template_names:
            raise bad_field(
                "chat_template",
                "this server does not take templates from requests (its option trust_request_chat_template)",
                "unsupported_parameter",
            )
        return asked

    def _tools(
        self, tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
    ) -> list[dict[str, Any]] | None:
        if choice not in (None, "auto", "none"):
            raise bad_field(
                "tool_choice",
                "tool_choice must be auto or none: making a model call a tool is not supported yet",
                "unsupported_parameter",
            )
        return None if choice == "none" or not tools else tools


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """As templates take it: without absent fields."""
    plain = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    for name in ("annotations", *UNREAD_IN_MESSAGES):
        plain.pop(name, None)
    if isinstance(message.content, list):
        plain["content"] = [_without_hints(part) for part in message.content]
    if isinstance(message.content, list):
        where = f"messages[{index}].content"
        try:
            text_parts(plain["content"], where)  # here too, so that the answer names the field
        except InvalidRequestError as error:
            raise bad_field(where, str(error), "unsupported_parameter") from None
    if message.tool_calls is not None:
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        plain.setdefault("content", "")
    elif message.content is None:
        raise bad_field(f"messages[{index}].content", f"messages[{index}] has no content", "missing_required_parameter")
    return plain


def _without_hints(part: Any) -> Any:
    if isinstance(part, dict) and "cache_control" in part:
        return {name: value for name, value in part.items() if name != "cache_control"}
    return part


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's API holds a call's arguments as JSON text; templates take the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError as error:
        raise ApiError(
            400, f"a tool call's arguments are not valid JSON: {error}", param="messages", code="invalid_value"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
