"""Which format an answer is read in: the server's options say it, or the chat template does."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from headrace.frontend.http.options import ServeOptions
from headrace.frontend.text.formats.declaration import (
    FormatError,
    OutputFormat,
    format_of_template,
    load_format,
)
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
            if self._calls.calls is None:
                raise OptionError(f"tool_call_parser={options.tool_call_parser}: that format has no tool calls")
        if options.reasoning_parser not in (None, AUTO, ""):
            self._reasoning = _load("reasoning_parser", options.reasoning_parser)
            if self._reasoning.reasoning is None:
                raise OptionError(f"reasoning_parser={options.reasoning_parser}: that format has no reasoning")
        self._found = functools.lru_cache(maxsize=16)(_found)

    def reader(
        self, tokenizer: Tokenizer, template: str, tools: Sequence[dict[str, Any]] | None, prompt: str
    ) -> Callable[[], OutputParser] | None:
        """Makes what reads one output that follows `prompt`; None where the answer is all content."""
        found = self._found(template) if self._finds_calls or self._finds_reasoning else None
        calls = self._calls or (found if self._finds_calls else None)
        reasoning = self._reasoning or (found if self._finds_reasoning else None)
        calls = calls if tools and calls is not None and calls.calls is not None else None
        reasoning = reasoning if reasoning is not None and reasoning.reasoning is not None else None
        if calls is None and reasoning is None:
            return None
        return functools.partial(
            OutputParser, reasoning, calls, prompt=prompt, tools=tools or (), hidden=tokenizer.special_tokens
        )


def _load(option: str, name: str) -> OutputFormat:
    try:
        return load_format(name)
    except FormatError as error:
        raise OptionError(f"{option}={name}: {error}") from None


def _found(template: str) -> OutputFormat | None:
    name = format_of_template(template)
    if name is None:
        logger.info("the chat template speaks for no known format of tool calls: what a model calls stays text")
        return None
    logger.info("answers are read as %s: the chat template speaks for it", name)
    return load_format(name)
