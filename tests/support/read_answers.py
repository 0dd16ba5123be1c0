"""Parses answers in a format as the server does, into one record that tests compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from example_tools import NOW, weather

from headrace.frontend.text.formats.channels import ChannelParser
from headrace.frontend.text.formats.declaration import load_format
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.parser import OutputParser

TOOLS = [weather(units={"type": ["string", "null"]}), NOW]


class Read(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]

    @classmethod
    def of(cls, events: Iterable[AnswerPart]) -> Read:
        events = list(events)
        calls: list[tuple[str, str]] = []
        for each in events:
            if each.name:
                assert each.call == len(calls), "calls are numbered in their order"
                calls.append((each.name, ""))
            if each.call >= 0:
                name, arguments = calls[each.call]
                calls[each.call] = (name, arguments + each.arguments)
        return cls("".join(each.content for each in events), "".join(each.reasoning for each in events), calls)


def parser_of(
    name: str,
    prompt: str = "",
    hidden: tuple[str, ...] = (),
    *,
    reasoning: str | None = "",
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> OutputParser:
    """A parser for the format `name`. reasoning: another format for the reasoning; None leaves it unparsed."""
    declared = load_format(name)
    if declared.channels is not None:
        return ChannelParser(declared.channels, reads_calls=True, prompt=prompt, hidden=hidden)
    thinking = declared if reasoning == "" else None if reasoning is None else load_format(reasoning)
    return OutputParser(thinking, declared, prompt=prompt, tools=tools, hidden=hidden)


def read(name: str, pieces: Iterable[str], *arguments: Any, finish_reason: str | None = None, **more: Any) -> Read:
    """Parses the pieces of an answer; the other arguments are those of `parser_of`. finish_reason: as in outputs."""
    parser = parser_of(name, *arguments, **more)
    return Read.of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish(finish_reason)])
