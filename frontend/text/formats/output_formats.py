"""Chooses the formats in which answers are parsed, from options or from the chat template."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.channels import ChannelParser, ForcedChannelCalls, StrictChannelCalls
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
AUTO, NONE = "auto", "none"
Tools = list[dict[str, Any]]
_TOOLS = re.compile(r"\btools\b")


class ToolChoice(NamedTuple):
    """A request's tools and its tool_choice."""

    shown: Tools | None = None
    """The tools that the chat template gets."""
    forced: Tools | None = None
    """The answer must call one of these; None: the model decides whether to call."""
    is_named: bool = False
    """tool_choice names the tool, so `forced` has just that one."""
    always_strict: bool = False
    """Calls must fit their schemas even if no tool has `strict`, provided the format of the model's calls is known."""

    @property
    def is_strict(self) -> bool:
        """Whether calls that the model makes by its own choice must fit their schemas."""
        return self.always_strict or self.asks_for_strict

    @property
    def asks_for_strict(self) -> bool:
        """Whether any tool has `strict`; it then applies to all."""
        return any(tool["function"].get("strict") for tool in self.shown or ())


NO_TOOLS = ToolChoice()
SCHEMA_NAMES = ("parameters", "inputSchema", "input_schema", "parametersJsonSchema", "parameters_json_schema")
"""What OpenAI's, MCP's, Anthropic's and Gemini's APIs call the schema of a function's parameters."""


def wrong_tool(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The request's field and the error message for the first tool that is not a function with a unique name and a
    schema; None if all are valid."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            return where, f"{where} must be {{type: function, function: {{name: ...}}}}"
        name = function.get("name")
        if not isinstance(name, str) or not name:
            return f"{where}.function.name", f"{where}.function needs a name"
        if name in names:
            return "tools", f"two tools are called {name!r:.100}"
        names.add(name)
        if (misnamed := misnamed_schema(function, f"{where}.function")) is not None:
            return misnamed
        if not isinstance(function.get("parameters") or {}, Mapping):
            at = f"{where}.function.parameters"
            return at, f"{at} must be a JSON schema, which is an object"
    return None


def misnamed_schema(function: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """The request's field and the error message, if the function's schema stands under another API's name alone: the
    model would be shown a function without parameters."""
    other = next((name for name in SCHEMA_NAMES if function.get(name) is not None), "parameters")
    if other == "parameters":
        return None
    at = f"{where}.{other}"
    return at, f"{at} is another API's name: give the function's schema as parameters"


class OutputFormats:
    """The formats that the options tool_call_parser and reasoning_parser select, for a server or for `LLM.chat`."""

    def __init__(
        self,
        tool_call_parser: str = AUTO,
        reasoning_parser: str | None = None,
        *,
        enable_auto_tool_choice: bool = True,
        plugins: Mapping[str, str | None] | None = None,
    ) -> None:
        """plugins: files with user-defined formats, by the option that names each; a file's stem is its format's name.

        Raises OptionError for an unknown format, and for one that lacks tool calls or reasoning respectively."""
        own: dict[str, OutputFormat] = {}
        for option, file in (plugins or {}).items():
            if file:
                own |= _load_plugin(option, file)
        self._calls = self._reasoning = None
        self._finds_calls, self._finds_reasoning = tool_call_parser == AUTO, reasoning_parser == AUTO
        if tool_call_parser not in (AUTO, NONE):
            self._calls = _load("tool_call_parser", tool_call_parser, own)
            if self._calls.calls is None and self._calls.channels is None:
                raise OptionError(f"tool_call_parser={tool_call_parser}: that format has no tool calls")
        if reasoning_parser not in (None, AUTO, NONE, ""):
            self._reasoning = _load("reasoning_parser", reasoning_parser, own)
            if self._reasoning.reasoning is None and self._reasoning.channels is None:
                raise OptionError(f"reasoning_parser={reasoning_parser}: that format has no reasoning")
        self._reads_calls = enable_auto_tool_choice
        self._found = functools.lru_cache(maxsize=16)(lambda template: _found(template, own))
        self._warn_where_hidden = functools.lru_cache(maxsize=16)(_warn_where_hidden)
        self._chosen = functools.lru_cache(maxsize=64)(self._choose)

    @property
    def named_reasoning(self) -> ReasoningFormat | None:
        """The format that the option reasoning_parser names, for prompts that were not rendered from a template."""
        return None if self._reasoning is None else self._reasoning.reasoning

    def of(self, prompt: RenderedChat, choice: ToolChoice) -> AnswerFormats:
        """The formats of the answers to this prompt."""
        return self._chosen(prompt.template, bool(choice.shown), bool(choice.forced))

    def _choose(self, template: str, shows_tools: bool, is_forced: bool) -> AnswerFormats:
        found = self._found(template) if self._finds_calls or self._finds_reasoning else _Found(None, None)
        calls = self._calls or (found.calls if self._finds_calls else None)
        reasoning = self._reasoning or (found.reasoning if self._finds_reasoning else None)
        if shows_tools:
            self._warn_where_hidden(template, is_format_lacking=self._finds_calls and calls is None)
        reads_calls = is_forced or (self._reads_calls and shows_tools)
        channels = (calls or reasoning or OutputFormat()).channels
        if channels is not None:
            return AnswerFormats(None, None, None, channels, reads_calls)
        calls = calls if calls is not None and calls.calls is not None else None
        if is_forced:
            calls = calls or OutputFormat(calls=PLAIN_CALLS)
        elif not reads_calls:
            calls = None
        thinking = self._reasoning or found.reasoning
        reading = reasoning if reasoning is not None and reasoning.reasoning is not None else None
        return AnswerFormats(calls, reading, thinking)


class AnswerFormats(NamedTuple):
    """The formats of the answers to one prompt."""

    calls: OutputFormat | None
    """The format in which calls are parsed; None: they stay text."""
    reading: OutputFormat | None
    """The format in which reasoning is parsed; None: it stays text."""
    thinking: OutputFormat | None
    """The format of the model's reasoning, whether it is parsed or not."""
    channels: ChannelFormat | None = None
    """For answers of messages with headers; the fields above are None then."""
    reads_channels_calls: bool = False

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reading is None else self.reading.reasoning

    def as_written(self, prompt: str, tokenizer: Tokenizer) -> AnswerFormats:
        """The formats with the markers that this prompt has opened the reasoning with, as the tokenizer spells them."""
        tokens = tokenizer.added_tokens
        calls, reading, thinking = (
            each and each.as_written(prompt, tokens) for each in (self.calls, self.reading, self.thinking)
        )
        return self._replace(calls=calls, reading=reading, thinking=thinking)

    def can_hold_calls(self, tokenizer: Tokenizer) -> bool:
        """Whether a grammar can make calls that the model chooses to make fit their tools' schemas."""
        if self.channels is not None:
            return self.reads_channels_calls and StrictChannelCalls.are_possible(
                self.channels, tokenizer.special_tokens
            )
        return self.calls is not None

    def grammar(
        self, tokenizer: Tokenizer, prompt: RenderedChat, choice: ToolChoice, *, several: bool, or_json: Any = None
    ) -> str | None:
        """The grammar of an answer that must call a tool, or whose calls must fit their schemas; None if neither holds.

        several: more than one call is allowed. or_json: the schema of an answer that is no call (with channels, of its
        final message)."""
        special = tokenizer.special_tokens
        if self.channels is not None:
            return self._channels_grammar(self.channels, special, choice, or_json)
        is_held = bool(choice.shown) and (choice.is_strict or or_json is not None)
        if self.calls is None or self.calls.calls is None:
            return None
        calls, several = self.calls.calls, several and not choice.is_named
        thinks_first = self.thinking.reasoning if self.thinking is not None else None
        if thinks_first is not None and not thinks_first.is_open_after(prompt.text):
            thinks_first = None
        if choice.forced:
            return ForcedCalls(calls, choice.forced, special, several=several, thinks_first=thinks_first).text()
        if not is_held:
            return None
        # If reasoning is parsed, the engine knows its end and applies the grammar only after it.
        thinks_first = thinks_first if self.reading is None else None
        return StrictCalls(calls, choice.shown or (), special, several=several, thinks_first=thinks_first).text(or_json)

    def _channels_grammar(
        self, channels: ChannelFormat, special: Mapping[str, int], choice: ToolChoice, or_json: Any
    ) -> str | None:
        if choice.forced:
            return ForcedChannelCalls(channels, choice.forced, special).text()
        shown = choice.shown if self.reads_channels_calls and choice.shown else ()
        is_held = or_json is not None or (shown and choice.is_strict)
        if not is_held or not StrictChannelCalls.are_possible(channels, special):
            return None
        return StrictChannelCalls(channels, shown, special).text(or_json)

    def parser_factory(
        self, tokenizer: Tokenizer, prompt: RenderedChat, choice: ToolChoice
    ) -> Callable[[], OutputParser] | None:
        """A factory of parsers, one for each output; None if answers are all content."""
        hidden = tuple(tokenizer.special_tokens)
        if self.channels is not None:
            return functools.partial(
                ChannelParser, self.channels, reads_calls=self.reads_channels_calls, prompt=prompt.text, hidden=hidden
            )
        if self.calls is None and self.reading is None:
            return None
        return functools.partial(
            OutputParser,
            self.reading,
            self.calls,
            prompt=prompt.text,
            tools=choice.shown or (),
            hidden=hidden,
            reads_slips=not (choice.forced or choice.is_strict),
        )


ONLY_TEXT = AnswerFormats(None, None, None)
"""Those of a template that speaks for no known format, where no call must come."""


def _load(option: str, name: str, own: Mapping[str, OutputFormat]) -> OutputFormat:
    try:
        return load_format(name, own)
    except FormatError as error:
        raise OptionError(f"{option}={name}: {error}") from None


def _load_plugin(option: str, file: str) -> dict[str, OutputFormat]:
    """The format in a user's file, by each of its names. Raises OptionError."""
    path = Path(file)
    if path.suffix not in (".yaml", ".yml"):
        raise OptionError(
            f"{option}={file}: a Python file is written against vLLM's parser classes, which are not here; declare the "
            "format in a YAML file (docs/tutorials/custom-parts.md says how) and name that"
        )
    declared = _load(option, file, {})
    return dict.fromkeys((path.stem, *declared.same_as), declared)


def _warn_where_hidden(template: str, *, is_format_lacking: bool) -> None:
    """Warns if the template does not show tools to the model."""
    if not _TOOLS.search(template):
        logger.warning(
            "the chat template never refers to `tools`: the model is not told of those that requests bring, and calls "
            "one only where tool_choice makes it%s. --chat-template gives another template",
            "; its calls stay text, as the template speaks for no format (tool_call_parser is auto)"
            if is_format_lacking
            else "",
        )


class _Found(NamedTuple):
    """The formats that a chat template's marks identify."""

    calls: OutputFormat | None
    reasoning: OutputFormat | None


def _found(template: str, own: Mapping[str, OutputFormat]) -> _Found:
    """The format with calls decides the reasoning too; if it has none, a format with reasoning alone is looked for."""
    name = format_of_template(template, own)
    calls = None if name is None else load_format(name, own)
    if name is None:
        logger.info("the chat template matches no known tool-call format: tool calls stay in the text")
    else:
        logger.info("answers are read as %s: the chat template speaks for it", name)
    if calls is not None and (calls.reasoning or calls.channels):
        return _Found(calls, calls)
    name = format_of_template(template, own, with_reasoning=True)
    if name is None:
        return _Found(calls, None)
    logger.info("reasoning is that of %s: the chat template speaks for it", name)
    return _Found(calls, load_format(name, own))
