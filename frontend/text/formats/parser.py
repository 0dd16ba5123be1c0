"""Parses a model's answer incrementally into reasoning, content and tool calls.

One parser serves every format (`declaration.py`). It is a generator that runs until it needs more text, so each rule is
written as if the whole answer were there. The result does not depend on how the text was divided into pieces, except
for the boundaries between events.

A call is emitted once its name is known. Until then its text is held back; if it turns out not to be a call, or the
answer ends, that text is content. Arguments are emitted as JSON text while they arrive. If an answer ends after a call
within another marker, name or call, that rest is dropped.

A model's output is untrusted and may be as long as the context: parsing takes time linear in the answer's length, and
little text is held back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from headrace.frontend.text.formats.declaration import CallFormat, OutputFormat
from headrace.frontend.text.formats.markers import Markers, make_markers
from headrace.frontend.text.formats.pieces import READ_AT_ONCE, SPACE, PieceReader, Reads, as_it_is
from headrace.frontend.text.formats.values import (
    NoCallError,
    as_json,
    as_text,
    nest_as_json,
    object_of,
    types_of,
    within_text,
)

_NAME = re.compile(r"[\w.\-/ ]{1,256}")
_MOST_SPACE = 1024
"""Most characters of white space that are held back until it is known whether a call follows."""
_INDEX = re.compile(r":\d+\s*$")
"""The end of a name that is a call's id."""
_BEGUN = re.compile(r"\S*|<\S* \S*")
"""Matches an incomplete name or marker at the end of an answer."""
_OTHER_KEYS = ("type", "id")
"""Keys that may come before a call's name. Any other key means that the object is no call."""


class Event(msgspec.Struct, frozen=True):
    """A parsed piece: content, reasoning, the name of a call, or a part of its arguments."""

    content: str = ""
    reasoning: str = ""
    call: int = -1
    """Index of the call that the name or the arguments belong to, from 0; -1 for content and reasoning."""
    name: str = ""
    id: str = ""
    """The call's id, if the model wrote one."""
    id_length: int = 0
    """Length of the id to generate if the model wrote none; 0 for any length."""
    arguments: str = ""


class _Marks(NamedTuple):
    """The markers of a format's answers."""

    ends: Mapping[str, str]
    """The end marker of a call, by the opener of the call or of its section."""
    loose: Mapping[str, str]
    """The same for markers that are no calls' unless a tool's name follows."""
    strays: frozenset[str]
    """Markers that are dropped after a call, where they close nothing."""
    ignored: frozenset[str]
    openers: Markers
    """Markers that begin calls or reasoning, and those that are dropped."""
    closers: Markers
    """Markers that end reasoning, and ignored ones."""


_BARE = ('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"', '[{"name"', '[{ "name"', '[ {"name"')
"""Beginnings of an object, or a list, that may be a call without markers."""


@functools.lru_cache(maxsize=64)
def _marks_of(reasoning: OutputFormat | None, calls: OutputFormat | None, hidden: tuple[str, ...]) -> _Marks:
    """Cached: a tokenizer may have hundreds of special tokens, which are the same for every answer."""
    ends, loose, strays = dict[str, str](), dict[str, str](), set[str]()
    if calls is not None and (form := calls.calls) is not None:
        ends = {form.opener: form.call[1], "": form.call[1], **dict(form.also)}
        loose = {begin: end for begin, end in form.loose if begin}
        if any(not begin for begin, _ in form.loose):
            loose |= dict.fromkeys(_BARE, "")
        if form.body == "xml" and form.name[0] and form.section is None:
            loose[form.name[0]] = form.call[1]  # the marker before a name may be all that a model writes
        strays = {form.call[1], form.after_arguments, *(form.section or ())[1:], *(end for _, end in form.also)}
        strays -= {"", "```"}  # a fence may be another's
    thinking = reasoning.reasoning if reasoning else None
    begin, end = (thinking.begin, thinking.end) if thinking else ("", "")
    left_out = (*(reasoning.left_out if reasoning else ()), *(calls.left_out if calls else ()), *hidden)
    strays = (strays | ({end} if calls else set())) - {begin, *ends, *loose, ""}
    ignored = tuple(each for each in left_out if each not in (*ends, *strays, begin, end))
    openers = sorted({*ends, *loose, *strays} - {""})
    return _Marks(
        ends,
        loose,
        frozenset(strays),
        frozenset(ignored),
        make_markers((*openers, begin, *ignored)),
        make_markers((end, *(["\n" + end] if thinking and thinking.has_lines else []), *sorted(ends), *ignored)),
    )


class OutputParser(PieceReader):
    """The parser of one answer: `feed` takes text and returns events."""

    def __init__(
        self,
        reasoning: OutputFormat | None,
        calls: OutputFormat | None,
        *,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        hidden: Sequence[str] = (),
    ) -> None:
        """reasoning, calls: the formats to parse; None leaves that part as content. prompt: the text before the answer,
        which may have opened the reasoning. tools: as in OpenAI's requests; their schemas say which values of xml
        formats are strings. hidden: special tokens to drop; the text has them only because they may be markers."""
        super().__init__()
        self._reasoning = reasoning.reasoning if reasoning else None
        self._calls = calls.calls if calls else None
        self._tools = tools
        self._marks, self._hidden = _marks_of(reasoning, calls, tuple(hidden)), frozenset(hidden)
        self._call_end = ""
        self._is_loose = False  # the marker of the call that is being read is not the format's
        self._space = ""  # white space at the end of the content so far; dropped if a call follows
        self._has_said = False  # whether the content is more than white space
        self._events: list[Event] = []
        self.call = -1
        """Index of the call that is being read, or was read last in the current section; -1 outside of calls. Only
        calls with known names count."""
        self.num_calls = 0
        self.has_open_call = False
        """Whether the arguments of the last call are still incomplete."""
        self.is_thinking = False
        """Whether reasoning has begun and not ended."""
        self._reader = self._read(prompt)

    def go_on(self, text: str) -> str | None:
        """The fast path for most pieces: the output if the text only continues the arguments of `call`, the reasoning
        (`is_thinking`) or else the content. None if it may do more; then call `feed`."""
        if self._stops is None or not text or self._stops(text):
            return None
        told = self._told
        return text if told is as_it_is else told(text)

    @property
    def goes_on_until(self) -> Callable[[str], object] | None:
        """A search function: as long as it finds nothing in a piece that is not empty, `go_on` returns the piece
        unchanged. None if `go_on` does not do that now. Valid until the next `feed`."""
        return self._stops if self._told is as_it_is else None

    def feed(self, text: str) -> list[Event]:
        """The events that are certain after this text."""
        if (said := self.go_on(text)) is not None:
            if self.call >= 0:
                return [Event(call=self.call, arguments=said)]
            return [Event(reasoning=said) if self.is_thinking else Event(content=said)]
        for start in range(0, len(text), READ_AT_ONCE):
            self._text += text[start : start + READ_AT_ONCE]
            next(self._reader, None)
        return self._news()

    def is_cut_by(self, stop_reason: int | str | None) -> bool:
        """Whether a stop string ended the answer within a call, whose arguments are then incomplete."""
        return self.has_open_call and isinstance(stop_reason, str)

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the answer."""
        self._ended = True
        next(self._reader, None)
        return self._news()

    def _news(self) -> list[Event]:
        events, self._events = self._events, []
        return _merged(events)

    # --- the answer -------------------------------------------------------------------------------------------------

    def _read(self, prompt: str) -> Reads:
        if self._reasoning is not None:
            yield from self._first_reasoning(prompt)
        yield from self._bare_calls()
        told = as_it_is if self._calls is None else self._told_content
        openers = self._marks.openers
        may_begin = openers.may_begin_in if self._calls is None else openers.may_begin_or_end_in_space
        while True:
            how = None if self._is_past_calls else told
            marker = yield from self._until(openers, self._content, told=how, stops=may_begin)
            if marker is None:
                break
            if marker in self._marks.ends or marker in self._marks.loose:
                yield from self._try_calls(marker, self._content)
            elif marker in self._marks.strays:
                if not self.num_calls and marker not in self._hidden:
                    self._content(marker)
            elif marker not in self._marks.ignored:
                yield from self._reason()
                yield from self._bare_calls()
        if not self.num_calls:
            self._events.append(Event(content=self._space))

    def _first_reasoning(self, prompt: str) -> Reads:
        """Reads reasoning that the prompt or the format opens. Reasoning that the answer opens is found in `_read`."""
        reasoning = self._reasoning
        assert reasoning is not None
        if not reasoning.is_open_after(prompt):
            return
        space = yield from self._skip_space()
        if not reasoning.begin or not (yield from self._accept(reasoning.begin)):
            self._text = space + self._text
        yield from self._reason()

    def _reason(self) -> Reads:
        """Reads reasoning up to its end, or up to a call that the model writes without ending it."""
        self._space, self.is_thinking = "", True
        num_calls, has_lines = self.num_calls, self._reasoning is not None and self._reasoning.has_lines
        if has_lines:
            yield from self._accept("\n")
        while (marker := (yield from self._until(self._marks.closers, self._think, told=as_it_is))) is not None:
            if marker in self._marks.ends:
                is_end = self._calls is not None and self._calls.section is not None
                yield from self._try_calls(marker, self._content if is_end else self._think)
                if is_end or self.num_calls > num_calls:
                    break
            elif marker not in self._marks.ignored:
                if has_lines:
                    yield from self._accept("\n")
                break
        self.is_thinking = False

    def _think(self, text: str) -> None:
        self._events.append(Event(reasoning=text))

    @property
    def _is_past_calls(self) -> bool:
        return self._calls is not None and self._calls.ends_answer and self.num_calls > 0

    def _content(self, text: str) -> None:
        if self._is_past_calls:
            return
        text = self._space + text
        num_said = len(text) if self._calls is None else max(len(text.rstrip(SPACE)), len(text) - _MOST_SPACE)
        self._space, self._has_said = text[num_said:], self._has_said or num_said > 0
        self._events.append(Event(content=text[:num_said]))

    def _told_content(self, text: str) -> str:
        """`_content` on the fast path, for text that does not end in white space."""
        text, self._space, self._has_said = self._space + text, "", True
        self._told = as_it_is
        return text

    def _bare_calls(self) -> Reads:
        """Reads calls without markers, at the beginning of the answer or after the reasoning."""
        calls = self._calls
        if calls is None or not calls.is_bare:
            return
        self._space += yield from self._skip_space()
        first = yield from self._peek(1)
        if first not in (("[",) if calls.body == "pythonic" else ("{", "[")):
            return
        if calls.opener.startswith(first) and (yield from self._peek(len(calls.opener))) == calls.opener:
            return
        yield from self._try_calls("", self._content)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _try_calls(self, opener: str, give: Callable[[str], None]) -> Reads:
        """Reads calls after their opener. Text that turns out not to be a call goes to `give`."""
        calls = self._calls
        assert calls is not None
        self._raw, self._is_loose = [opener], opener in self._marks.loose and opener not in self._marks.ends
        self._call_end = (self._marks.loose if self._is_loose else self._marks.ends)[opener]
        if opener in _BARE or (opener and opener == calls.name[0]):  # it belongs to the call
            self._raw, self._text = [], opener + self._text
        try:
            yield from self._section()
        except NoCallError:
            raw = "".join(self._raw or ())
            if self.call >= 0 and self._ended and _BEGUN.fullmatch(self._text):
                self._text = ""
            elif raw.strip() and not (self.call >= 0 and calls.section is not None):
                give(raw)
        self._raw, self.call, self._is_loose = None, -1, False

    def _section(self) -> Reads:
        calls = self._calls
        assert calls is not None
        section = None if self._is_loose else calls.section
        yield from self._one_call(calls, is_opened=section is None)
        while True:
            space = yield from self._skip_space()
            if section is not None and ((yield from self._accept_marker(section[1])) or self._is_over):
                if self.call < 0:  # all of it was broken
                    raise NoCallError
                return
            if calls.separator and (yield from self._accept(calls.separator)):
                yield from self._skip_space()
                if section is None:
                    yield from self._accept(calls.call[0])
            elif section is None and not (
                (calls.is_bare or self._is_loose) and calls.body == "json" and (yield from self._peek(1)) == "{"
            ):
                self._text = (space if self._has_said else "") + self._text  # it separates two texts, if one follows
                return
            yield from self._one_call(calls, is_opened=section is None)

    def _one_call(self, calls: CallFormat, *, is_opened: bool) -> Reads:
        yield from self._skip_space()
        if calls.call[0] and not is_opened and not (yield from self._accept_marker(calls.call[0])):
            yield from self._skip_noise(calls)
        try:
            yield from self._body()
        except NoCallError:
            if self._ended or self._is_loose or calls.section is None or not all(calls.call):
                raise
            yield from self._skip_broken(calls)
        self.has_open_call = False
        for end in filter(None, (calls.after_arguments, self._call_end)):
            yield from self._skip_space()
            yield from self._accept_marker(end)
        if self.call >= 0:
            self._raw = []

    def _skip_broken(self, calls: CallFormat) -> Reads:
        """Skips the rest of a call in a section, up to the next marker. Raises NoCallError if the answer ends."""
        assert calls.section is not None
        found = yield from self._until(make_markers((*calls.call, calls.section[1])), lambda text: None)
        if found is None:
            raise NoCallError
        if self._raw:
            self._raw.pop()
        self._text = found + self._text

    def _skip_noise(self, calls: CallFormat) -> Reads:
        """Skips text in a section up to the marker of a call. Raises NoCallError if none follows."""
        assert calls.section is not None
        found = yield from self._until(make_markers((calls.call[0], calls.section[1])), lambda text: None)
        if found != calls.call[0]:
            raise NoCallError

    def _accept_marker(self, marker: str) -> Reads:
        """Takes the marker if it comes next. If the answer ends within or after a call, takes an incomplete one too."""
        if (yield from self._accept(marker)):
            return True
        if not (self.call >= 0 and self._ended and self._text and marker.startswith(self._text)):
            return False
        self._take(len(self._text))
        return True

    def _body(self) -> Reads:
        calls = self._calls
        assert calls is not None
        yield from self._skip_space()
        start = yield from self._peek(1)
        body = calls.body
        if calls.is_either:
            body = "json" if start in ("{", "[") else "xml"
        if body == "pythonic":
            yield from (self._list(self._python_call) if start == "[" else self._python_call())
        elif body == "xml":
            yield from self._xml_call(calls)
        elif body == "escaped":
            yield from self._escaped_call(calls)
        elif start == "[" and not calls.name[0].startswith("["):
            yield from self._list(self._json_call)
        elif body == "named_json":
            yield from self._named_call(calls)
        else:
            yield from self._json_call()

    def _begin(self, name: str) -> int:
        calls = self._calls
        assert calls is not None
        name, id = name.strip(), ""
        needs_tool = self._is_loose
        if calls.name_is_id:
            needs_tool = needs_tool or _INDEX.search(name) is None
            id, name = name, _INDEX.sub("", name.split(".", 1)[-1])
        if not name or (needs_tool and not self._may_name(name)):
            raise NoCallError
        if calls.space_is_content and self._has_said:
            self._events.append(Event(content=self._space))
        self._space, self._raw, self.call, self.is_thinking = "", None, self.num_calls, False
        self._events.append(Event(call=self.call, name=name, id=id, id_length=calls.id_length))
        self.num_calls += 1
        self.has_open_call = True
        return self.call

    def _may_name(self, name: str) -> bool:
        """Whether a call that lacks the format's markers may have this name."""
        if not self._tools:
            return self._calls is not None and (self._calls.is_bare or self._calls.body == "xml")
        return any(each["function"]["name"] == name for each in self._tools)

    def _arguments(self, call: int, text: str) -> None:
        self._events.append(Event(call=call, arguments=text))

    def _more_text(self, call: int) -> Callable[[str], None]:
        """A function that emits text as a part of a JSON string."""
        return lambda text: self._arguments(call, within_text(text))

    def _list(self, read_one: Callable[[], Reads]) -> Reads:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            if (yield from self._accept("]")):
                return
            yield from read_one()
            self.has_open_call = False
            yield from self._skip_space()
            yield from self._accept(",")

    def _json_call(self) -> Reads:
        """An object with a name and arguments, in any order. A call begins once its name and the beginning of its
        arguments are known. Without arguments it is one only in formats whose calls need a marker: other objects may
        have a name too."""
        calls = self._calls
        assert calls is not None
        yield from self._expect("{")
        call, name, held = -1, None, ""
        num_calls, needs_arguments = self.num_calls, calls.is_bare or self._is_loose
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            try:
                key = yield from self._json_string()
                yield from self._skip_space()
                yield from self._expect(":")
                yield from self._skip_space()
                if key in calls.name_keys and name is None:
                    name = yield from self._json_string()
                    if held:
                        call = self._begin(name)
                        self._arguments(call, held)
                elif key in calls.argument_keys and name is None:
                    held = object_of((yield from self._json_whole()))
                elif key in calls.argument_keys and not held:
                    held = "{}"
                    call = yield from self._json_arguments(name or "")
                elif call < 0 and key not in _OTHER_KEYS:
                    raise NoCallError
                else:
                    yield from self._json_whole()
            except NoCallError:
                if self._ended and self.num_calls == num_calls and name is not None and not needs_arguments:
                    self._begin(name)
                raise
            yield from self._skip_space()
            yield from self._accept(",")
        if call < 0:
            if name is None or needs_arguments:
                raise NoCallError
            call = self._begin(name)
        if not held:
            self._arguments(call, "{}")

    def _json_arguments(self, name: str) -> Reads:
        """Emits a call, and its arguments while they arrive; once complete if the object is written as a JSON string.
        Returns the call. Raises NoCallError for arguments that are no object."""
        if (yield from self._begins_object()):
            call = self._begin(name)
            yield from self._json_value(lambda text: self._arguments(call, text), told=as_it_is)
            return call
        arguments = object_of((yield from self._json_whole()))
        call = self._begin(name)
        self._arguments(call, arguments)
        return call

    def _begins_object(self) -> Reads:
        """Whether an object comes next. Raises NoCallError if what it begins with is no key."""
        while (inner := self._text[1:].lstrip(SPACE)) == "" and self._text[:1] in ("", "{") and not self._ended:
            if len(self._text) > _MOST_SPACE:
                raise NoCallError
            yield
        if self._text[:1] == "{" and inner and inner[0] not in ('"', "}"):
            raise NoCallError
        return self._text[:1] == "{"

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
        stop = calls.call[1] if calls.section is not None else ""
        yield from self._json_value(lambda text: self._arguments(call, text), told=as_it_is, stop=stop)

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
            self._arguments(call, f"{separator}{as_text(key.strip())}: ")
            separator = ", "
            yield from self._skip_space()
            if (yield from self._peek(1)) in ("'", '"'):
                self._arguments(call, '"')
                yield from self._python_text(self._more_text(call))
                self._arguments(call, '"')
                yield from self._skip_space()
                if (yield from self._peek(1)) not in (",", ")"):
                    raise NoCallError
            else:
                self._arguments(call, (yield from self._python_value()))
            yield from self._accept(",")
        self._arguments(call, "{}" if separator == "{" else "}")

    def _properties_of(self, name: str) -> Mapping[str, Any]:
        """The properties in the schema of this tool's parameters."""
        functions = (each["function"] for each in self._tools)
        schemas = [each.get("parameters") or {} for each in functions if each["name"] == name]
        return schemas[-1].get("properties") or {} if schemas else {}

    def _xml_call(self, calls: CallFormat) -> Reads:
        before_name, after_name, before_value, _ = calls.parameter
        if calls.kind and (yield from self._accept(calls.kind)):
            yield from self._short_until(calls.name[0])
        elif calls.name[0]:
            yield from self._expect(calls.name[0])
        name = (yield from self._short_until(calls.name[1])) if calls.name[1] else (yield from self._short_before("<"))
        call, separator, said = self._begin(name), "{", set[str]()
        properties = self._properties_of(name.strip())
        while True:
            yield from self._skip_space()
            if not (yield from self._accept_marker(before_name)):
                break
            key = (yield from self._short_until(after_name)).strip()
            if before_value:
                yield from self._skip_space()
                if not (yield from self._accept_marker(before_value)):
                    raise NoCallError
            self._arguments(call, f"{separator}{as_text(key)}: ")
            separator = ", "
            others = properties.keys() - said
            said.add(key)
            yield from self._xml_value(call, calls, types_of(properties.get(key) or {}), others)
        if self._is_over:
            raise NoCallError
        self._arguments(call, "{}" if separator == "{" else "}")

    def _xml_value(self, call: int, calls: CallFormat, types: frozenset[str], others: Set[str]) -> Reads:
        """Emits a string while it arrives, without the line breaks around it; other values once they are complete. A
        value of unknown type is a string unless it is an object or a list. others: the tool's further parameters."""
        after, has_lines = calls.parameter[3], calls.values_have_lines
        if has_lines:
            yield from self._accept("\n")
        space = "" if "string" in types else (yield from self._skip_space())
        is_nest = "string" not in types and (yield from self._peek(1)) in ("{", "[")
        if "string" in types or not (types or is_nest):
            self._text = space + self._text
            if "null" in types and (yield from self._accept_null(("\n" if has_lines else "") + after)):
                self._arguments(call, "null")
                return
            self._arguments(call, '"')
            yield from self._until_end_of_value(calls, others, self._more_text(call), is_text=True)
            self._arguments(call, '"')
            return
        parts: list[str] = []
        if is_nest:  # a string within may contain the marker
            yield from self._nest(parts.append)
        yield from self._until_end_of_value(calls, others, parts.append)
        text = "".join(parts)
        said = as_json(text.strip(SPACE))
        self._arguments(call, as_text(space + text) if not types and said.startswith('"') else said)

    def _until_end_of_value(
        self, calls: CallFormat, others: Set[str], give: Callable[[str], None], *, is_text: bool = False
    ) -> Reads:
        """Passes a parameter's value to `give` and takes the marker after it. In formats with a line per marker, a
        model may leave that out: then the next parameter's marker, or that after the arguments, ends the value."""
        after, line = calls.parameter[3], "\n" if calls.values_have_lines else ""
        slips = [line + each for each in (calls.parameter[0], calls.after_arguments) if line and each]
        ends, reads = make_markers((line + after, after, *slips)), self._until_end_of_text if is_text else self._until
        while True:
            found = yield from reads(ends, give)
            if found is None:
                raise NoCallError
            if found not in slips:
                return
            marker = found.removeprefix(line)
            if (yield from self._ends_value(calls, marker, others)):
                self._text = marker + self._text
                return
            give(found)

    def _ends_value(self, calls: CallFormat, marker: str, others: Set[str]) -> Reads:
        """Whether a marker within a value ends it, by what follows: one of the tool's other parameters, or the end of
        the call."""
        if marker == calls.parameter[0]:
            while (at := self._text.find(calls.parameter[1])) < 0 and len(self._text) <= 300 and not self._ended:
                yield
            return self._text[: max(at, 0)].strip() in others
        while (rest := self._text.lstrip(SPACE)) == "" or calls.call[1].startswith(rest):
            if self._ended or rest == calls.call[1] or len(self._text) > _MOST_SPACE:
                break
            yield
        return rest == "" or rest.startswith(calls.call[1])

    def _accept_null(self, after: str) -> Reads:
        """Takes null or None and the marker after it, for a value that the schema allows to be null."""
        for word in ("null", "None"):
            if (yield from self._accept(word + after)):
                return True
        return False

    def _escaped_call(self, calls: CallFormat) -> Reads:
        yield from self._expect(calls.name[0])
        name = yield from self._short_until(calls.name[1])
        call, separator = self._begin(name), "{"
        properties = self._properties_of(name.strip())
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
        """Emits a string while it arrives; other values once they are complete."""
        parts: list[str] = []
        if (yield from self._accept_marker(escape)):
            is_text = not types or "string" in types
            if "null" in types and (yield from self._accept_null(escape)):
                self._arguments(call, "null")
                return
            end = make_markers((escape,))
            if is_text:
                self._arguments(call, '"')
                found = yield from self._until_end_of_text(end, self._more_text(call))
            else:
                found = yield from self._until(end, parts.append, is_value=True)
            if found is None:
                raise NoCallError
            self._arguments(call, '"' if is_text else as_json("".join(parts).strip(SPACE)))
            return
        if (yield from self._peek(1)) in ("{", "["):
            self._arguments(call, (yield from self._escaped_nest(escape)))
            return
        if (yield from self._peek(1)) == '"':
            self._arguments(call, (yield from self._json_whole()))
            return
        scalar = yield from self._scalar()
        if self._is_over:
            raise NoCallError
        self._arguments(call, as_json(scalar))

    def _escaped_nest(self, escape: str) -> Reads:
        """An object or a list, converted to JSON; models also write JSON itself."""
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


def _merged(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of one kind, and drops empty ones."""
    if len(events) == 1 and events[0].arguments:
        return events
    runs: list[list[Event]] = []
    for event in events:
        if not (event.content or event.reasoning or event.name or event.arguments):
            continue
        if runs and _goes_on(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _goes_on(last: Event, event: Event) -> bool:
    if event.arguments:
        return last.call == event.call and not event.name
    return bool((last.content and event.content) or (last.reasoning and event.reasoning))


def _joined(run: list[Event]) -> Event:
    return msgspec.structs.replace(
        run[0],
        content="".join(each.content for each in run),
        reasoning="".join(each.reasoning for each in run),
        arguments="".join(each.arguments for each in run),
    )
