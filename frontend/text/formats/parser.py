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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.frontend.text.formats.call_reader import MOST_SPACE, CallReader, as_other_families, spellings
from headrace.frontend.text.formats.declaration import CallFormat, OutputFormat
from headrace.frontend.text.formats.events import AnswerPart, merged
from headrace.frontend.text.formats.markers import Markers, make_markers
from headrace.frontend.text.formats.pieces import LONGEST_NAME, READ_AT_ONCE, SPACE, Reads, as_it_is
from headrace.frontend.text.formats.values import NoCallError

_BEGUN = re.compile(r"\S*|<\S* \S*")
"""Matches an incomplete name or marker at the end of an answer."""


class _Marks(NamedTuple):
    """The markers of a format's answers."""

    ends: Mapping[str, str]
    """The end marker of a call, by the opener of the call or of its section."""
    loose: Mapping[str, str]
    """The same for markers that are no calls' unless a tool's name follows."""
    strays: frozenset[str]
    """Markers that are dropped after a call, where they close nothing; that of reasoning also before any content."""
    left_out: frozenset[str]
    """Markers that are dropped anywhere."""
    ignored: frozenset[str]
    """Those of them that mean nothing else."""
    headers: frozenset[str]
    in_fences: Mapping[str, Markers]
    """By the beginning of a fence, the markers of calls that it may enclose with their markers."""
    openers: Markers
    """Markers that begin calls or reasoning, and those that are dropped."""
    closers: Markers
    """Markers that end reasoning, and ignored ones."""


_BARE = tuple(
    f"{before}{quote}name{quote}"
    for before in ("{", "{ ", "{\n", "{\n  ", "{\n    ", "[{", "[{ ", "[ {")
    for quote in ('"', "'", "")
)
"""Beginnings of an object, or a list, that may be a call without markers."""


_BARE_LIST = ("[",)
"""The same in Python."""
_FENCE, _LABEL = "```", re.compile(r"[\w.+\-]{0,20}\s{0,40}")
"""The beginning of a fence, and what may follow it before what is enclosed."""


def _spellings(form: CallFormat) -> tuple[str, ...]:
    """The markers before a name, which may be all that a model writes before a call."""
    if form.body == "json":
        form = as_other_families()
    return tuple(each.before for each in spellings(*form.name)) if form.body == "xml" else (form.name[0],)


@functools.lru_cache(maxsize=64)
def _marks_of(
    reasoning: OutputFormat | None, calls: OutputFormat | None, hidden: tuple[str, ...], *, reads_slips: bool
) -> _Marks:
    """Cached: a tokenizer may have hundreds of special tokens, which are the same for every answer."""
    ends, loose, strays = dict[str, str](), dict[str, str](), set[str]()
    if calls is not None and (form := calls.calls) is not None:
        ends = {form.opener: form.call[1], "": form.call[1], **dict(form.also)}
        if reads_slips:
            loose = {begin: end for begin, end in form.loose if begin}
        if reads_slips and any(not begin for begin, _ in form.loose):
            loose |= dict.fromkeys(_BARE if form.body == "json" else _BARE_LIST, "")
        has_own = form.body in ("xml", "elements") and form.name[0] and not (form.section and any(form.call))
        if reads_slips and (has_own or form.body == "json"):
            loose |= dict.fromkeys(_spellings(form), form.call[1] if has_own else "")
        if reads_slips and form.section and all(form.call):
            loose[form.call[0]] = form.call[1]  # models leave the section's markers out
        strays = {form.call[1], form.after_arguments, *(form.section or ())[1:], *(end for _, end in form.also)}
        strays -= {"", "```"}  # a fence may be another's
    thinking = reasoning.reasoning if reasoning else None
    begin, end = (thinking.begin, thinking.end) if thinking else ("", "")
    formats = [each for each in (reasoning, calls) if each is not None]
    headers = tuple(dict.fromkeys(marker for each in formats for marker in each.headers))
    left_out = (*(marker for each in formats for marker in each.left_out), *hidden)
    strays = (strays | {end}) - {begin, *ends, *loose, ""}
    fences = ({_FENCE} | {each for each in loose if each.startswith(_FENCE)}) if ends and reads_slips else set()
    marked = sorted({*ends, *loose} - {"", *fences})
    in_fences = {
        fence: make_markers(tuple(each for each in marked if fence not in loose or each not in (*_BARE, *_BARE_LIST)))
        for fence in fences
    }
    ignored = tuple(each for each in left_out if each not in (*ends, *strays, *headers, begin, end))
    openers = sorted({*ends, *loose, *fences, *strays} - {""})
    return _Marks(
        ends,
        loose,
        frozenset(strays),
        frozenset(left_out),
        frozenset(ignored),
        frozenset(headers),
        in_fences,
        make_markers((*openers, *headers, begin, *ignored)),
        make_markers(
            (
                end,
                *(["\n" + end] if thinking and thinking.has_lines else []),
                *(sorted(ends) if reads_slips else ()),
                *headers,
                *ignored,
            )
        ),
    )


class OutputParser(CallReader):
    """The parser of one answer: `feed` takes text and returns events."""

    def __init__(
        self,
        reasoning: OutputFormat | None,
        calls: OutputFormat | None,
        *,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        hidden: Sequence[str] = (),
        reads_slips: bool = True,
    ) -> None:
        """reasoning, calls: the formats to parse; None leaves that part as content. prompt: the text before the answer,
        which may have opened the reasoning. tools: as in OpenAI's requests; their schemas say which values of xml
        formats are strings. hidden: special tokens to drop; the text has them only because they may be markers.
        reads_slips: read calls in other markers, and within reasoning. No grammar holds those to their schemas."""
        super().__init__(calls.calls if calls else None, tools, reads_slips=reads_slips)
        self._reasoning = reasoning.reasoning if reasoning else None
        self._prefix = ""
        if self._reasoning is not None and self._reasoning.is_content:
            self._prefix, self._reasoning, reasoning = self._reasoning.begin, None, None
        self._marks = _marks_of(reasoning, calls, tuple(hidden), reads_slips=reads_slips)
        self._call_end = ""
        self._section_ends: tuple[str, ...] = ()
        self._is_in_code = False
        """A fence has begun that encloses no call."""
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

    def feed(self, text: str) -> list[AnswerPart]:
        """The events that are certain after this text."""
        if (said := self.go_on(text)) is not None:
            if self.call >= 0:
                return [AnswerPart(call=self.call, arguments=said)]
            return [AnswerPart(reasoning=said) if self.is_thinking else AnswerPart(content=said)]
        for start in range(0, len(text), READ_AT_ONCE):
            self._text += text[start : start + READ_AT_ONCE]
            next(self._reader, None)
        return self._news()

    def is_cut_by(self, stop_reason: int | str | None) -> bool:
        """Whether a stop string ended the answer within a call, whose arguments are then incomplete."""
        return self.has_open_call and isinstance(stop_reason, str)

    def finish(self, finish_reason: str | None = None, stop_reason: int | str | None = None) -> list[AnswerPart]:
        """The remaining events, at the end of the answer. finish_reason, stop_reason: its output's. If the model itself
        ended the answer, end markers that are missing are taken as forgotten, else as cut off."""
        self._ended = True
        self._is_whole = finish_reason == "stop" and not isinstance(stop_reason, str)
        next(self._reader, None)
        return self._news()

    def read(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> list[AnswerPart]:
        """The events of an output's next text: with a finish_reason its last, and then all that remain."""
        events = self.feed(text)
        return events if finish_reason is None else events + self.finish(finish_reason, stop_reason)

    def _news(self) -> list[AnswerPart]:
        events, self._events = self._events, []
        return merged(events)

    # --- the answer -------------------------------------------------------------------------------------------------

    def _read(self, prompt: str) -> Reads:
        if self._prefix:
            self._content(self._prefix)
        if self._reasoning is not None:
            yield from self._first_reasoning(prompt)
        if self._is_in_header(prompt):
            yield from self._skip_header()
        yield from self._bare_calls()
        openers = self._marks.openers
        may_begin = openers.may_begin_in if self._calls is None else openers.may_begin_or_end_in_space
        while True:
            how = None if self._is_past_calls else self._told_content
            marker = yield from self._until(openers, self._content, told=how, stops=may_begin)
            if marker is None:
                break
            if marker in self._marks.in_fences:
                yield from self._fenced(marker)
            elif marker in self._marks.ends or marker in self._marks.loose:
                yield from self._try_calls(marker, self._content)
            elif marker in self._marks.strays:
                is_first = not self._has_said and self._reasoning is not None and marker == self._reasoning.end
                if not self.num_calls and not is_first and marker not in self._marks.left_out:
                    self._content(marker)
            elif marker in self._marks.headers:
                yield from self._skip_header()
            elif marker not in self._marks.ignored:
                yield from self._reason()
                yield from self._bare_calls()
        if not self.num_calls:
            self._events.append(AnswerPart(content=self._space))

    def _is_in_header(self, prompt: str) -> bool:
        """Whether the answer to this prompt begins within a message's header."""
        headers = self._marks.headers
        begin = max((prompt.rfind(each) + len(each) for each in headers if each in prompt), default=0)
        return bool(headers) and self._marks.openers.find(prompt[begin:], is_over=True) is None

    def _skip_header(self) -> Reads:
        """Drops a message's header, the text up to the next marker. What is too long for one is content, and so is what
        another header follows."""
        openers = self._marks.openers
        while (found := openers.find(self._text, is_over=self._ended)) is None and not self._ended:
            if len(self._text) - openers.held(self._text) > LONGEST_NAME:
                return
            yield
        if found is not None and found.start() <= LONGEST_NAME and found.group() not in self._marks.headers:
            self._take(found.start())

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
        if self._reasoning is not None and self._reasoning.label:
            yield from self._accept(self._reasoning.label)
        if has_lines:
            yield from self._accept("\n")
        while (marker := (yield from self._until(self._marks.closers, self._think, told=as_it_is))) is not None:
            if marker in self._marks.ends:
                is_end = self._calls is not None and self._calls.section is not None
                yield from self._try_calls(marker, self._content if is_end else self._think)
                if is_end or self.num_calls > num_calls:
                    break
            elif marker in self._marks.headers:
                self._text = marker + self._text
                break
            elif marker not in self._marks.ignored:
                if has_lines:
                    yield from self._accept("\n")
                break
        self.is_thinking = False

    def _think(self, text: str) -> None:
        self._events.append(AnswerPart(reasoning=text))

    @property
    def _is_past_calls(self) -> bool:
        return self._calls is not None and self._calls.ends_answer and self.num_calls > 0

    def _content(self, text: str) -> None:
        if self._is_past_calls:
            return
        text = self._space + text
        num_said = len(text) if self._calls is None else max(len(text.rstrip(SPACE)), len(text) - MOST_SPACE)
        self._space = text[num_said:]
        self._has_said = self._has_said or bool(text[:num_said].strip(SPACE))
        self._events.append(AnswerPart(content=text[:num_said]))

    def _told_content(self, text: str) -> str:
        """`_content` on the fast path, for text that does not end in white space."""
        text, self._space = self._space + text, ""
        self._has_said = self._has_said or not text.isspace()
        self._told = as_it_is if self._has_said else self._told_content
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

    def _fenced(self, fence: str) -> Reads:
        """Reads what comes after the beginning of a fence. If calls with their own markers do, it is dropped."""
        if self._is_in_code and fence == _FENCE:  # its end
            self._is_in_code = False
            self._content(fence)
            return
        markers, num_calls = self._marks.in_fences[fence], self.num_calls
        while True:
            label = _LABEL.match(self._text)
            assert label is not None
            rest = self._text[label.end() :]
            found = markers.find(rest, is_over=self._ended)
            is_next = found is not None and found.start() == 0
            if is_next or self._ended or markers.held(rest) < len(rest) or len(self._text) > MOST_SPACE:
                break
            yield
        if not is_next:
            if fence in self._marks.loose:
                yield from self._try_calls(fence, self._content)
            else:
                self._content(fence)
            self._is_in_code = self.num_calls == num_calls
            return
        before = [fence + self._take(label.end())]

        def no_call(text: str) -> None:
            self._content("".join(before) + text)

        while found is not None and found.start() == 0:
            self._take(found.end())
            yield from self._try_calls(found.group(), no_call)
            if self.num_calls == num_calls:
                return
            num_calls = self.num_calls
            before.clear()
            space = yield from self._skip_space()
            if (yield from self._accept(_FENCE)):
                return
            found = yield from self._next_marker(markers)
        self._text = space + self._text

    def _next_marker(self, markers: Markers) -> Reads:
        """The first marker, if one may come next."""
        while (found := markers.find(self._text, is_over=self._ended)) is None and not self._ended:
            if markers.held(self._text) < len(self._text):
                break
            yield
        return found

    # --- calls ------------------------------------------------------------------------------------------------------

    def _try_calls(self, opener: str, give: Callable[[str], None]) -> Reads:
        """Reads calls after their opener. Text that turns out not to be a call goes to `give`."""
        calls = self._calls
        assert calls is not None
        self._raw, self._is_loose = [opener], opener in self._marks.loose and opener not in self._marks.ends
        self._call_end = (self._marks.loose if self._is_loose else self._marks.ends)[opener]
        self._section_ends = () if self._is_loose or calls.section is None else (calls.section[1],)
        if self._section_ends and opener in dict(calls.also):
            self._section_ends, self._call_end = (self._call_end, *self._section_ends), calls.call[1]
        if opener in (*_BARE, *_BARE_LIST) or (opener and opener in _spellings(calls)):  # it belongs to the call
            self._raw, self._text = [], opener + self._text
        try:
            yield from self._section()
        except NoCallError:
            raw = "".join(self._raw or ())
            if self.call < 0 and not raw:  # no reader took what the opener put back: it must not be found again
                raw = self._take(len(opener))
            if self.call >= 0:
                self._text = self._text.lstrip("}")  # of the broken call
            if self.call >= 0 and self._ended and _BEGUN.fullmatch(self._text):
                self._text = ""
            elif raw.strip() and not (self.call >= 0 and calls.section is not None):
                give(raw)
        self._raw, self.call, self._is_loose = None, -1, False

    def _section(self) -> Reads:
        calls = self._calls
        assert calls is not None
        section = None if self._is_loose else calls.section
        is_closed = yield from self._one_call(calls, is_opened=section is None)
        while True:
            space = yield from self._skip_space()
            if section is not None and ((yield from self._end_of_section()) or self._is_over):
                if self.call < 0:  # all of it was broken
                    raise NoCallError
                return
            if calls.separator and (yield from self._accept(calls.separator)):
                yield from self._skip_space()
                if section is None:
                    yield from self._accept(calls.call[0])
            elif section is None and not (yield from self._another_follows(calls, is_closed=is_closed)):
                self._text = (space if self._has_said else "") + self._text  # it separates two texts, if one follows
                return
            is_closed = yield from self._one_call(calls, is_opened=section is None)

    def _end_of_section(self) -> Reads:
        for end in self._section_ends:
            if (yield from self._accept_marker(end)):
                return True
        return False

    def _another_follows(self, calls: CallFormat, *, is_closed: bool) -> Reads:
        """Whether a call without markers follows another one: an object, or in a fence a line of Python."""
        if calls.body == "json":
            return (calls.is_bare or self._is_loose) and (yield from self._peek(1)) == "{"
        if calls.body != "pythonic" or not self._is_loose or not self._call_end or is_closed:
            return False
        return (yield from self._peek(1)).isidentifier()

    def _one_call(self, calls: CallFormat, *, is_opened: bool) -> Reads:
        """Returns whether the call's end marker was there."""
        yield from self._skip_space()
        while is_opened and calls.call[0] and not self._is_loose and (yield from self._accept(calls.call[0])):
            yield from self._skip_space()  # written twice
        if calls.call[0] and not is_opened and not (yield from self._accept_marker(calls.call[0])):
            yield from self._skip_noise(calls)
        try:
            yield from self._body()
        except NoCallError:
            if self._ended or self._is_loose or calls.section is None or not all(calls.call):
                raise
            yield from self._skip_broken(calls)
        self.has_open_call = False
        is_closed = False
        if calls.body == "json" and self._call_end:
            yield from self._skip_space()
            yield from self._accept("}")  # one too many
        for end in filter(None, (calls.after_arguments, self._call_end)):
            yield from self._skip_space()
            is_closed = yield from self._accept_marker(end)
        if self.call >= 0:
            self._raw = []
        return is_closed

    def _skip_broken(self, calls: CallFormat) -> Reads:
        """Skips the rest of a call in a section, up to the next marker. Raises NoCallError if the answer ends."""
        assert calls.section is not None
        found = yield from self._until(make_markers((*calls.call, *self._section_ends)), lambda text: None)
        if found is None:
            raise NoCallError
        if self._raw:
            self._raw.pop()
        self._text = found + self._text

    def _skip_noise(self, calls: CallFormat) -> Reads:
        """Skips text in a section up to the marker of a call. Raises NoCallError if none follows."""
        assert calls.section is not None
        found = yield from self._until(make_markers((calls.call[0], *self._section_ends)), lambda text: None)
        if found != calls.call[0]:
            raise NoCallError
