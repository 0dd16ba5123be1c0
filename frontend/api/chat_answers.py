"""The answers of `LLM.chat` and `AsyncLLM.chat`, read as the server reads them: reasoning, content and tool calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.api.outputs import AnswerMessage, CompletionOutput, RequestOutput
from headrace.frontend.text.chat_template import RenderedChat
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.text.formats.choice import OutputFormats
    from headrace.frontend.text.formats.parser import OutputParser
    from headrace.frontend.text.tokenizer import Tokenizer


class AnswerReader:
    """Of the answers to one conversation."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, options: Mapping[str, Any], parsers: Mapping[str, str]
    ) -> None:
        """options: of apply_chat_template, which gave the prompt. parsers: what `take_parsers` took. Raises OptionError
        for a format that nobody knows."""
        self._tokenizer = tokenizer
        self._token_ids: dict[int, list[int]] = {}
        self._make_reader: Callable[[], OutputParser] | None = None
        tools = options.get("tools")
        if not tools and not parsers:
            return
        from headrace.frontend.text.formats.choice import ToolChoice

        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
        rendered, choice = RenderedChat(prompt, template), ToolChoice(_as_openai(tools or ()))
        formats = _formats(parsers.get("tool_call_parser", "auto"), parsers.get("reasoning_parser"))
        self._make_reader = formats.of(rendered, choice).reader(tokenizer, rendered, choice)

    def read(self, request: RequestOutput, *, is_delta: bool = False) -> None:
        """Gives each output that has ended its message. is_delta: outputs hold what is new alone."""
        if self._make_reader is None:
            return
        for output in request.outputs:
            token_ids = output.token_ids
            if is_delta:
                token_ids = self._token_ids.setdefault(output.index, [])
                token_ids += output.token_ids
            if output.finish_reason is not None:
                output.message = self._message(output, token_ids)

    def _message(self, output: CompletionOutput, token_ids: Sequence[int]) -> AnswerMessage:
        from headrace.frontend.text.formats.message import message_of

        assert self._make_reader is not None
        # Markers may be special tokens, which the output's text lacks.
        text = self._tokenizer.decode(token_ids)
        if isinstance(stop := output.stop_reason, str) and not output.text.endswith(stop):
            text = text[: text.rfind(stop)]
        reader = self._make_reader()
        return message_of([*reader.feed(text), *reader.finish()])


@functools.cache
def _formats(tool_call_parser: str, reasoning_parser: str | None) -> OutputFormats:
    from headrace.frontend.text.formats.choice import OutputFormats

    return OutputFormats(tool_call_parser, reasoning_parser)


def _as_openai(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Templates may take tools of other shapes; those without a name say nothing about calls."""
    functions = [each.get("function", each) for each in tools]
    return [{"type": "function", "function": each} for each in functions if "name" in each] or None


def take_parsers(given: dict[str, Any]) -> dict[str, str]:
    """Takes the names of formats out of chat's arguments. Raises InvalidRequestError."""
    names = ("tool_call_parser", "reasoning_parser")
    taken = {name: value for name in names if (value := given.pop(name, None)) is not None}
    for name, value in taken.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be the name of a format, not {value!r:.100}")
    return taken
