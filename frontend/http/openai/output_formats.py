"""Which format an answer is read in: the server's options say it, or the chat template does."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.frontend.http.openai.prompts import RenderedChat
from headrace.frontend.http.openai.tool_choice import ToolChoice
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.text.formats.channels import ChannelParser, ForcedChannelCalls
from headrace.frontend.text.formats.declaration import (
    ChannelFormat,
    FormatError,
    OutputFormat,
    ReasoningFormat,
    format_of_template,
    load_format,
)
from headrace.frontend.text.formats.grammar import PLAIN_CALLS, ForcedCalls, StrictCalls
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import OptionError

logger = logging.getLogger(__name__)
AUTO = "auto"


class OutputFormats:
    """The server's, by its options tool_call_parser and reasoning_parser."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises OptionError for a format that nobody knows or that lacks what it is named for."""
        self._calls = self._reasoning = None
        self._finds_calls = options.tool_call_parser == AUTO
        self._finds_reasoning = options.reasoning_parser == AUTO
        if options.tool_call_parser not in (AUTO, "none"):
            self._calls = _load("tool_call_parser", options.tool_call_parser)
            if self._calls.calls is None and self._calls.channels is None:
                raise OptionError(f"tool_call_parser={options.tool_call_parser}: that format has no tool calls")
        if options.reasoning_parser not in (None, AUTO, ""):
            self._reasoning = _load("reasoning_parser", options.reasoning_parser)
            if self._reasoning.reasoning is None and self._reasoning.channels is None:
                raise OptionError(f"reasoning_parser={options.reasoning_parser}: that format has no reasoning")
        self._reads_calls = options.enable_auto_tool_choice
        self._found = functools.lru_cache(maxsize=16)(_found)

    def of(self, prompt: RenderedChat, choice: ToolChoice) -> AnswerFormats:
        """Those of the answers to this prompt."""
        found = self._found(prompt.template) if self._finds_calls or self._finds_reasoning else None
        calls = self._calls or (found if self._finds_calls else None)
        reasoning = self._reasoning or (found if self._finds_reasoning else None)
        reads_calls = bool(choice.forced or (self._reads_calls and choice.shown))
        channels = (calls or reasoning or OutputFormat()).channels
        if channels is not None:
            return AnswerFormats(None, None, None, channels, reads_calls)
        calls = calls if calls is not None and calls.calls is not None else None
        if choice.forced:
            calls = calls or OutputFormat(calls=PLAIN_CALLS)
        elif not reads_calls:
            calls = None
        thinking = self._reasoning or found or OutputFormat()
        reading = reasoning if reasoning is not None and reasoning.reasoning is not None else None
        return AnswerFormats(calls, reading, thinking.reasoning)


class AnswerFormats(NamedTuple):
    """Of the answers to one prompt."""

    calls: OutputFormat | None
    """In which calls are read; None: they stay text."""
    reading: OutputFormat | None
    """In which reasoning is read; None: it stays text."""
    thinking: ReasoningFormat | None
    """In which the model sets its reasoning off, read or not."""
    channels: ChannelFormat | None = None
    """Instead of all these."""
    reads_channels_calls: bool = False

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reading is None else self.reading.reasoning

    def grammar(
        self, tokenizer: Tokenizer, prompt: RenderedChat, choice: ToolChoice, *, several: bool, or_json: Any = None
    ) -> str | None:
        """Of an answer that has to call a tool, or whose calls have to fit their schemas; None of others. several: it
        may call more than one. or_json: the schema of an answer that is no call."""
        special = tokenizer.special_tokens
        if self.channels is not None:
            return ForcedChannelCalls(self.channels, choice.forced, special).text() if choice.forced else None
        if self.calls is None or self.calls.calls is None:
            return None
        calls, several = self.calls.calls, several and not choice.is_named
        thinks_first = self.thinking if self.thinking is not None and self.thinking.is_open_after(prompt.text) else None
        if choice.forced:
            return ForcedCalls(calls, choice.forced, special, several=several, thinks_first=thinks_first).text()
        if not choice.shown or not (choice.is_strict or or_json is not None):
            return None
        # Of reasoning that is read, the engine knows the end.
        thinks_first = thinks_first if self.reading is None else None
        return StrictCalls(
            calls, choice.shown, special, several=several, thinks_first=thinks_first, or_json=or_json
        ).text()

    def reader(
        self, tokenizer: Tokenizer, prompt: RenderedChat, choice: ToolChoice
    ) -> Callable[[], OutputParser] | None:
        """What makes a reader of one output; None where the answer is all content."""
        hidden = tuple(tokenizer.special_tokens)
        if self.channels is not None:
            return functools.partial(
                ChannelParser, self.channels, reads_calls=self.reads_channels_calls, prompt=prompt.text, hidden=hidden
            )
        if self.calls is None and self.reading is None:
            return None
        return functools.partial(
            OutputParser, self.reading, self.calls, prompt=prompt.text, tools=choice.shown or (), hidden=hidden
        )


def _load(option: str, name: str) -> OutputFormat:
    try:
        return load_format(name)
    except FormatError as error:
        raise OptionError(f"{option}={name}: {error}") from None


def _found(template: str) -> OutputFormat | None:
    name = format_of_template(template)
    if name is None:
        logger.info("the chat template matches no known tool-call format: tool calls stay in the text")
        return None
    logger.info("answers are read as %s: the chat template speaks for it", name)
    return load_format(name)
