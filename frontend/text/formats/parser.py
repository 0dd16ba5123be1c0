"""Reads a model's answer as it comes: what is reasoning, what is content, and which tools it calls.

One reader for every format (`declaration.py`). It is a generator over the text that has come: it runs until it needs
more, so each rule is written as if the whole answer were there. What it gives does not depend on how the text was cut
into pieces, but for where events are cut.

A call becomes known with its name; until then its text is held back, and is content after all when it turns out to be
no call or the answer ends. Arguments are given as JSON text as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.frontend.text.formats.declaration import CallFormat, OutputFormat
from headrace.frontend.text.formats.markers import Markers, make_markers
from headrace.frontend.text.formats.values import (
    NoCallError,
    as_json,
    as_text,
    nest_as_json,
    python_as_json,
    types_of,
)

Reads = Generator[None, None, Any]
"""Yields when it needs more text, and returns what it read."""
_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]<\[]")
_PYTHON_STOP = re.compile(r"""["'()\[\]{},\\]""")
_NAME = re.compile(r"[\w.\-/ ]{1,256}")
_OTHER_KEYS = ("type", "id")
"""What may stand before a call's name; any other key says that an object is no call."""


class Event(msgspec.Struct, frozen=True):
    """One of: content, reasoning, the name of a call, more of its arguments."""

    content: str = ""
    reasoning: str = ""
    call: int = -1
    """Which call, from 0, the name or the arguments belong to."""
    name: str = ""
    id: str = ""
    """The call's own id, where the model writes one."""
    arguments: str = ""


class OutputParser:
    """One answer's. Feed it text; it gives events."""

    def __init__(
        self,
        reasoning: OutputFormat | None,
        calls: OutputFormat | None,
        *,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        hidden: Sequence[str] = (),
    ) -> None:
        """prompt: the text that the answer follows; it may have begun the reasoning. tools: as in OpenAI's requests,
        their schemas say which values of xml formats are text. hidden: special tokens that are in the text for the
        markers' sake alone."""
        self._reasoning = reasoning.reasoning if reasoning else None
        self._calls = calls.calls if calls else None
        self._schemas = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
        opener = self._calls.opener if self._calls else ""
        left_out = (*(reasoning.left_out if reasoning else ()), *(calls.left_out if calls else ()), *hidden)
        self._call_openers = frozenset((opener, *(self._calls.also if self._calls else ())))
        ignored = tuple(each for each in left_out if each not in self._call_openers)
        self._ignored = frozenset(ignored)
        begin = self._reasoning.begin if self._reasoning else ""
        self._openers = make_markers((*sorted(self._call_openers), begin, *ignored))
        self._closers = make_markers((self._reasoning.end if self._reasoning else "", *ignored))
        self._text, self._ended = "", False
        self._raw: list[str] | None = None
        """What has been read of a call whose name is not known yet; None outside."""
        self._space = ""  # the end of the content so far: dropped when a call follows
        self._events: list[Event] = []
        self.num_calls = 0
        self._reader = self._read(prompt)

    def feed(self, text: str) -> list[Event]:
        """What is certain now."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Event]:
        """The rest: nothing follows."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._reader, None)
        events, self._events = self._events, []
        return _merged(events)

    # --- the answer -------------------------------------------------------------------------------------------------

    def _read(self, prompt: str) -> Reads:
        calls = self._calls
        if self._reasoning is not None:
            yield from self._first_reasoning(prompt)
        if calls is not None and calls.is_bare:
            self._space += yield from self._skip_space()
            begin = yield from self._peek(max(1, len(calls.opener)))
            if begin.startswith("[" if calls.body == "pythonic" else ("{", "[")) and begin != calls.opener:
                yield from self._try_calls("")
        while (marker := (yield from self._until(self._openers, self._content))) is not None:
            if marker in self._call_openers:
                yield from self._try_calls(marker)
            elif marker not in self._ignored:
                yield from self._reason()
        if not self.num_calls:
            self._events.append(Event(content=self._space))

    def _first_reasoning(self, prompt: str) -> Reads:
        """Where the prompt or the format opens it; one that the answer opens is found in the content."""
        reasoning = self._reasoning
        assert reasoning is not None
        if not reasoning.is_open_after(prompt):
            return
        space = yield from self._skip_space()
        if not reasoning.begin or not (yield from self._accept(reasoning.begin)):
            self._text = space + self._text
        yield from self._reason()

    def _reason(self) -> Reads:
        self._space = ""
        while (yield from self._until(self._closers, self._think)) in self._ignored:
            pass

    def _think(self, text: str) -> None:
        self._events.append(Event(reasoning=text))

    def _content(self, text: str) -> None:
        text = self._space + text
        said = text if self._calls is None else text.rstrip(_SPACE)
        self._space = text[len(said) :]
        self._events.append(Event(content=said))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _try_calls(self, opener: str) -> Reads:
        """After the opener. What turns out to be no call is content."""
        self._raw = [opener]
        try:
            yield from self._section()
        except NoCallError:
            raw = "".join(self._raw or ())
            if raw.strip():
                self._content(raw)
        self._raw = None

    def _section(self) -> Reads:
        calls = self._calls
        assert calls is not None
        yield from self._one_call(calls, is_opened=calls.section is None)
        while True:
            yield from self._skip_space()
            if calls.section is not None and ((yield from self._accept(calls.section[1])) or self._is_over):
                return
            if calls.separator and (yield from self._accept(calls.separator)):
                yield from self._skip_space()
                if calls.section is None:
                    yield from self._accept(calls.call[0])
            elif calls.section is None and not (calls.is_bare and (yield from self._peek(1)) == "{"):
                return
            yield from self._one_call(calls, is_opened=calls.section is None)

    @property
    def _is_over(self) -> bool:
        return self._ended and not self._text

    def _one_call(self, calls: CallFormat, *, is_opened: bool) -> Reads:
        yield from self._skip_space()
        if calls.call[0] and not is_opened:
            yield from self._expect(calls.call[0])
        yield from self._body()
        for end in filter(None, (calls.after_arguments, calls.call[1])):
            yield from self._skip_space()
            yield from self._accept(end)
        self._raw = []

    def _body(self) -> Reads:
        calls = self._calls
        assert calls is not None
        yield from self._skip_space()
        start = yield from self._peek(1)
        if calls.body == "pythonic":
            yield from (self._list(self._python_call) if start == "[" else self._python_call())
        elif calls.body == "xml":
            yield from self._xml_call(calls)
        elif calls.body == "escaped":
            yield from self._escaped_call(calls)
        elif start == "[" and not calls.name[0].startswith("["):
            yield from self._list(self._json_call)
        elif calls.body == "named_json":
            yield from self._named_call(calls)
        else:
            yield from self._json_call()

    def _begin(self, name: str) -> int:
        calls = self._calls
        assert calls is not None
        name, id = name.strip(), ""
        if calls.name_is_id:
            id, name = name, name.split(".", 1)[-1].rsplit(":", 1)[0]
        if not name:
            raise NoCallError
        self._space, self._raw = "", None
        self._events.append(Event(call=self.num_calls, name=name, id=id))
        self.num_calls += 1
        return self.num_calls - 1

    def _arguments(self, call: int, text: str) -> None:
        self._events.append(Event(call=call, arguments=text))

    def _list(self, read_one: Callable[[], Reads]) -> Reads:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            if (yield from self._accept("]")):
                return
            yield from read_one()
            yield from self._skip_space()
            yield from self._accept(",")

    def _json_call(self) -> Reads:
        """An object with a name and arguments, in any order. Arguments that come first are held back."""
        calls = self._calls
        assert calls is not None
        yield from self._expect("{")
        call, held = -1, ""
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            key = yield from self._json_string()
            yield from self._skip_space()
            yield from self._expect(":")
            yield from self._skip_space()
            if key in calls.name_keys and call < 0:
                call = self._begin((yield from self._json_string()))
                if held:
                    self._arguments(call, held)
            elif key in calls.argument_keys and call < 0:
                held = yield from self._json_whole()
            elif key in calls.argument_keys and not held:
                held = yield from self._json_arguments(call)
            elif call < 0 and key not in _OTHER_KEYS:
                raise NoCallError
            else:
                yield from self._json_whole()
            yield from self._skip_space()
            yield from self._accept(",")
        if call < 0:
            raise NoCallError
        if not held:
            self._arguments(call, "{}")

    def _json_arguments(self, call: int) -> Reads:
        """Given as they come; an object that is written as a string, once it is whole."""
        if (yield from self._peek(1)) == '"':
            text = yield from self._json_string()
            self._arguments(call, text)
            return text or "{}"
        yield from self._json_value(lambda text: self._arguments(call, text))
        return "{}"

    def _named_call(self, calls: CallFormat) -> Reads:
        if calls.name[0]:
            yield from self._expect(calls.name[0])
        if calls.name[1]:
            name = yield from self._short_until(calls.name[1])
        else:
            name = yield from self._short_before("{")
        call = self._begin(name.removesuffix("[ARGS]").split("[CALL_ID]")[0])
        yield from self._skip_space()
        if (yield from self._peek(1)) != "{":
            self._arguments(call, "{}")
            return
        yield from self._json_value(lambda text: self._arguments(call, text))

    def _python_call(self) -> Reads:
        name = yield from self._short_until("(")
        if not _NAME.fullmatch(name.strip()):
            raise NoCallError
        call, separator = self._begin(name), "{"
        while True:
            yield from self._skip_space()
            if (yield from self._accept(")")):
                break
            key = yield from self._short_until("=")
            value = yield from self._python_value()
            self._arguments(call, f"{separator}{as_text(key.strip())}: {value}")
            separator = ", "
            yield from self._accept(",")
        self._arguments(call, "{}" if separator == "{" else "}")

    def _xml_call(self, calls: CallFormat) -> Reads:
        before_name, after_name, before_value, after_value = calls.parameter
        if calls.kind and (yield from self._accept(calls.kind)):
            yield from self._short_until(calls.name[0])
        elif calls.name[0]:
            yield from self._expect(calls.name[0])
        name = (yield from self._short_until(calls.name[1])) if calls.name[1] else (yield from self._short_before("<"))
        call, separator = self._begin(name), "{"
        properties = self._schemas.get(name.strip(), {}).get("properties") or {}
        while True:
            yield from self._skip_space()
            if not (yield from self._accept(before_name)):
                break
            key = (yield from self._short_until(after_name)).strip()
            if before_value:
                yield from self._skip_space()
                yield from self._expect(before_value)
            self._arguments(call, f"{separator}{as_text(key)}: ")
            separator = ", "
            yield from self._xml_value(call, make_markers((after_value,)), types_of(properties.get(key) or {}))
        if self._is_over:
            raise NoCallError
        self._arguments(call, "{}" if separator == "{" else "}")

    def _xml_value(self, call: int, end: Markers, types: frozenset[str]) -> Reads:
        """Text is given as it comes, without the line breaks that set it off; other values once they are whole."""
        if "string" in types:
            has_lines = self._calls is not None and self._calls.values_have_lines
            if has_lines:
                yield from self._accept("\n")
            self._arguments(call, '"')
            held = ""

            def give(text: str) -> None:
                nonlocal held
                text = held + text
                held = "\n" if has_lines and text.endswith("\n") else ""
                self._arguments(call, as_text(text.removesuffix(held) if held else text)[1:-1])

            if (yield from self._until(end, give)) is None:
                raise NoCallError
            self._arguments(call, '"')
            return
        parts: list[str] = []
        yield from self._skip_space()
        if (yield from self._peek(1)) in ("{", "["):  # which may hold the marker as text
            yield from self._json_value(parts.append)
        if (yield from self._until(end, parts.append)) is None:
            raise NoCallError
        self._arguments(call, as_json("".join(parts).strip(_SPACE)))

    def _escaped_call(self, calls: CallFormat) -> Reads:
        yield from self._expect(calls.name[0])
        name = yield from self._short_until(calls.name[1])
        call, separator = self._begin(name), "{"
        properties = self._schemas.get(name.strip(), {}).get("properties") or {}
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            key = (yield from self._short_until(":")).strip()
            self._arguments(call, f"{separator}{as_text(key)}: ")
            separator = ", "
            yield from self._escaped_value(call, calls.escape, types_of(properties.get(key) or {}))
            yield from self._skip_space()
            yield from self._accept(",")
        self._arguments(call, "{}" if separator == "{" else "}")

    def _escaped_value(self, call: int, escape: str, types: frozenset[str]) -> Reads:
        """Text is given as it comes; other values once they are whole."""
        parts: list[str] = []
        if (yield from self._accept(escape)):
            is_text = not types or "string" in types
            if is_text:
                self._arguments(call, '"')
            give = (lambda text: self._arguments(call, as_text(text)[1:-1])) if is_text else parts.append
            if (yield from self._until(make_markers((escape,)), give)) is None:
                raise NoCallError
            self._arguments(call, '"' if is_text else as_json("".join(parts).strip(_SPACE)))
            return
        if (yield from self._peek(1)) in ("{", "["):
            self._arguments(call, (yield from self._escaped_nest(escape)))
            return
        while (end := _SCALAR_END.search(self._text)) is None and not self._ended:
            yield
        if end is None:
            raise NoCallError
        self._arguments(call, as_json(self._take(end.start())))

    def _escaped_nest(self, escape: str) -> Reads:
        """An object or a list, as JSON; models mix it up with JSON itself."""
        parts: list[str] = []
        markers, depth = make_markers((escape, "{", "}", "[", "]")), 0
        while True:
            found = yield from self._until(markers, parts.append)
            if found is None:
                raise NoCallError
            if found == escape:
                text: list[str] = []
                if (yield from self._until(make_markers((escape,)), text.append)) is None:
                    raise NoCallError
                parts.append(as_text("".join(text)))
                continue
            parts.append(found)
            depth += 1 if found in "{[" else -1
            if depth == 0:
                return nest_as_json("".join(parts))

    # --- pieces of text ---------------------------------------------------------------------------------------------

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._raw is not None:
            self._raw.append(taken)
        return taken

    def _peek(self, count: int) -> Reads:
        """The next characters, as many as there are at the end."""
        while len(self._text) < count and not self._ended:
            yield
        return self._text[:count]

    def _skip_space(self) -> Reads:
        skipped = ""
        while True:
            rest = self._text.lstrip(_SPACE)
            skipped += self._take(len(self._text) - len(rest))
            if rest or self._ended:
                return skipped
            yield

    def _accept(self, literal: str) -> Reads:
        """Takes it, if it comes next."""
        while len(self._text) < len(literal) and literal.startswith(self._text) and not self._ended:
            yield
        if not self._text.startswith(literal):
            return False
        self._take(len(literal))
        return True

    def _expect(self, literal: str) -> Reads:
        if not (yield from self._accept(literal)):
            raise NoCallError

    def _until(self, markers: Markers, give: Callable[[str], None]) -> Reads:
        """Gives what comes before the first of the markers, and takes that; None at the end of the answer."""
        while True:
            found = markers.find(self._text)
            if found is not None:
                if found.start():
                    give(self._take(found.start()))
                self._take(len(found.group()))
                return found.group()
            certain = len(self._text) - (0 if self._ended else markers.held(self._text))
            if certain:
                give(self._take(certain))
            if self._ended:
                return None
            yield

    def _short_until(self, marker: str) -> Reads:
        """A name or key. At most 300 characters, else this is no call."""
        text: str = yield from self._short_before(marker)
        self._take(len(marker))
        return text

    def _short_before(self, marker: str) -> Reads:
        while (at := self._text.find(marker)) < 0:
            if self._ended or len(self._text) > 300:
                raise NoCallError
            yield
        if at > 300:
            raise NoCallError
        return self._take(at)

    def _json_string(self) -> Reads:
        if (yield from self._peek(1)) != '"':
            raise NoCallError
        text = yield from self._json_whole()
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise NoCallError from None

    def _json_whole(self) -> Reads:
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return "".join(parts)

    def _json_value(self, give: Callable[[str], None]) -> Reads:
        """One value, given as it comes. Raises NoCallError where the answer ends within it."""
        depth, in_string, began = 0, False, False
        while True:
            text, at = self._text, 0
            while at < len(text):
                if in_string:
                    stop = _IN_STRING.search(text, at)
                    at = len(text) if stop is None else stop.start()
                    if stop is None:
                        break
                    if stop.group() == "\\":
                        if at + 2 > len(text):
                            break  # the escaped character is not there yet
                        at += 2
                        continue
                    in_string, at = False, at + 1
                elif not began and text[at] not in '"{[':
                    end = _SCALAR_END.search(text, at)
                    if end is not None or self._ended:
                        give(self._take(end.start() if end else len(text)))
                        return
                    at = len(text)
                    break
                else:
                    began = True
                    stop = _OUTSIDE.search(text, at)
                    at = len(text) if stop is None else stop.end()
                    if stop is None:
                        break
                    in_string = stop.group() == '"'
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(stop.group(), 0)
                if depth <= 0 and not in_string:
                    give(self._take(at))
                    return
            if began and at:
                give(self._take(at))
            if self._ended:
                if self._text:
                    give(self._take(len(self._text)))
                raise NoCallError
            yield

    def _python_value(self) -> Reads:
        """A literal, up to the comma or bracket that ends it, as JSON."""
        depth, quote, at = 0, "", 0
        while True:
            while (stop := _PYTHON_STOP.search(self._text, at)) is not None:
                at, found = stop.end(), stop.group()
                if found == "\\":
                    at += 1
                elif quote:
                    quote = "" if found == quote else quote
                elif found in "\"'":
                    quote = found
                elif depth == 0 and found in ",)":
                    return python_as_json(self._take(at - 1))
                else:
                    depth += 1 if found in "([{" else -1 if found in ")]}" else 0
            if self._ended:
                raise NoCallError
            length = len(self._text)
            at = max(at, length)
            yield


def _merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one; without empty ones."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if not (event.content or event.reasoning or event.name or event.arguments):
            continue
        if last is not None and last.content and event.content:
            merged[-1] = Event(content=last.content + event.content)
        elif last is not None and last.reasoning and event.reasoning:
            merged[-1] = Event(reasoning=last.reasoning + event.reasoning)
        elif last is not None and event.arguments and last.call == event.call and not event.name:
            merged[-1] = msgspec.structs.replace(last, arguments=last.arguments + event.arguments)
        else:
            merged.append(event)
    return merged
