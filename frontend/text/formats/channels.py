"""Parser and grammars for answers that consist of messages with headers, as gpt-oss writes them (Harmony):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"a": 1}<|call|>

The header says whether a message is reasoning, a call's arguments or content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from headrace.frontend.text.formats.declaration import ChannelFormat
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.grammar import Rules, arguments_of, literal, regex
from headrace.frontend.text.formats.markers import make_markers
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.formats.pieces import Reads, as_it_is

_LONGEST_HEADER = 300
_RECIPIENT = " to="


class ChannelParser(OutputParser):
    """The parser of one answer, with the interface of OutputParser. Text without a header is content."""

    def __init__(
        self, channels: ChannelFormat, *, reads_calls: bool, prompt: str = "", hidden: Sequence[str] = ()
    ) -> None:
        """reads_calls: parse calls; otherwise they are content."""
        self._format, self._reads_calls = channels, reads_calls
        self._own = (channels.start, channels.channel, channels.message, *channels.ends)
        self._header = re.compile(rf"(?:{re.escape(channels.channel)}\s*(\w+))|to=([^\s<]+)")
        self._left_out = tuple(each for each in hidden if each not in self._own)
        super().__init__(None, None, prompt=prompt)

    def _read(self, prompt: str) -> Reads:
        form = self._format
        headers = make_markers((form.start, form.channel, *form.ends, *self._left_out))
        if (yield from self._accept(_RECIPIENT)):  # the prompt has begun a header, which the answer continues so
            if header := (yield from self._short_until_or_end(form.message)):
                yield from self._message(*self._said_in(_RECIPIENT + header))
            else:
                self._say(_RECIPIENT)
        while (marker := (yield from self._until(headers, self._say, told=as_it_is))) is not None:
            if marker in (form.start, form.channel):
                header = marker + (yield from self._short_until_or_end(form.message))
                yield from self._message(*self._said_in(header))

    def _said_in(self, header: str) -> tuple[str, str]:
        """The channel and the recipient in a header; "" for a missing one."""
        found = self._header.findall(header)
        return next((name for name, _ in found if name), ""), next((to for _, to in found if to), "")

    def _message(self, channel: str, recipient: str) -> Reads:
        form, call = self._format, -1
        name = recipient.removeprefix(form.functions)
        if recipient.startswith(form.functions) and name and self._reads_calls:
            call = self.num_calls
            self._events.append(AnswerPart(call=call, name=name))
            self.num_calls += 1
            self.has_open_call = True
        self.call = call
        self.is_thinking = channel in form.reasoning or bool(recipient and not recipient.startswith(form.functions))
        has_arguments = False

        def told(text: str) -> str:
            nonlocal has_arguments
            has_arguments = has_arguments or not text.isspace()
            return text

        def give(text: str) -> None:
            told(text)
            if call >= 0:
                self._events.append(AnswerPart(call=call, arguments=text))
            elif self.is_thinking:
                self._events.append(AnswerPart(reasoning=text))
            else:
                self._say(text)

        ends = make_markers((*form.ends, form.start, *self._left_out))
        while (end := (yield from self._until(ends, give, told=told, is_value=call >= 0))) in self._left_out:
            pass
        self.call, self.is_thinking = -1, False
        self.has_open_call = self.has_open_call and end is None
        if end == form.start:  # the next header has begun
            self._text = end + self._text
        if call >= 0 and not has_arguments:
            self._events.append(AnswerPart(call=call, arguments="{}"))

    def _short_until_or_end(self, marker: str) -> Reads:
        """Reads a header up to its end `marker`; "" if it has none, or is longer than _LONGEST_HEADER characters."""
        longest = _LONGEST_HEADER + len(marker)
        while (at := self._text.find(marker, 0, longest)) < 0 and not self._ended and len(self._text) < longest:
            yield
        if at < 0:
            return ""
        header = self._take(at)
        self._take(len(marker))
        return header

    def _say(self, text: str) -> None:
        self._events.append(AnswerPart(content=text))


class ForcedChannelCalls(Rules):
    """The grammar of an answer that must call a tool: optional reasoning, then one call."""

    def __init__(
        self, channels: ChannelFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int]
    ) -> None:
        super().__init__(special_ids)
        channel, message = self._marker(channels.channel), self._marker(channels.message)
        thoughts = self._text_until("thought", channels.ends[0])
        thought = f"{channel} {literal(channels.reasoning[0])} {message} {thoughts}"
        again = f"{self._marker(channels.start)} {literal('assistant')}"
        calls = []
        for tool in tools:
            function = tool["function"]
            to = literal(f"commentary to={channels.functions}{function['name']} ")
            schema = self._json(arguments_of(function))
            calls.append(self._rule("call", f"{channel} {to} {self._marker(channels.constrain)} {message} {schema}"))
        end = self._marker(channels.ends[1])
        self._rules.append(f"start: ({thought} {again})? ({' | '.join(calls)}) ({end})?")


class StrictChannelCalls(Rules):
    """The grammar of an answer that may hold any messages, but in which each call must name one of the tools and fit
    its schema. Another message may follow each. The markers must be special tokens, so that they cannot occur in
    text."""

    def __init__(
        self, channels: ChannelFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int]
    ) -> None:
        super().__init__(special_ids)
        self._format, self._tools = channels, tools
        self._channel, self._message = self._marker(channels.channel), self._marker(channels.message)
        self._again = f"{self._marker(channels.start)} {literal('assistant')} message"
        self._type = f'(" "? ({self._marker(channels.constrain)} | "json"))?'

    @staticmethod
    def are_possible(channels: ChannelFormat, special_tokens: Container[str]) -> bool:
        markers = (channels.start, channels.channel, channels.message, *channels.ends)
        return all(each in special_tokens for each in markers)

    def text(self, or_json: Any = None) -> str:
        """The grammar. or_json: the schema of the final message. May be called once."""
        first, *others = (self._marker(end) for end in self._format.ends)
        self._rules.append(r"TEXT: /(.|\n)*/")
        to_function = regex(_RECIPIENT.strip() + self._format.functions)
        self._rules.append(rf"WORDS: TEXT & ~/(.|\n)*{to_function}(.|\n)*/")
        after = f"({first} ({self._again})? | {' | '.join(others)})?"
        calls = " | ".join(self._call(tool["function"]) for tool in self._tools)
        ways = [f"({calls}) ({' | '.join((first, *others))})? ({self._again})?"] if calls else []
        if or_json is None:
            ways.append(
                f"WORDS ({self._channel} WORDS ({self._marker(self._format.constrain)} WORDS)?)? "
                f"{self._message} TEXT {after}"
            )
        else:
            thinks = " | ".join(map(literal, self._format.reasoning))
            ways.append(f"{self._channel} ({thinks}) {self._message} TEXT {first} {self._again}")
            final = f"{self._channel} {literal('final')} {self._type} {self._message}"
            ways.append(f"{final} %json {json.dumps(or_json)} ({' | '.join(others)})?")
        self._rules.append(f"message: {' | '.join(ways)}")
        self._rules.append("start: message" + (" | WORDS" if or_json is None else ""))
        return super().text()

    def _call(self, function: Mapping[str, Any]) -> str:
        """The rule of a call. Its header may name the function before or after the channel."""
        to, ways = f"{_RECIPIENT}{self._format.functions}{function['name']}", []
        for channel in ("commentary", *self._format.reasoning):
            ways.append(f"{literal(to)} {self._channel} {literal(channel)}")
            ways.append(f"{self._channel} {literal(channel + to)}")
        schema = self._json(arguments_of(function))
        return self._rule("call", f"({' | '.join(ways)}) {self._type} {self._message} {schema}")
