"""`PieceReader`: the elementary rules of a format's parser, over text that arrives in pieces.

Each rule is a generator, which yields when it needs more text. A model's output is untrusted and may be as long as the
context: reading takes time linear in the text's length, and little text is held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from headrace.frontend.text.formats.markers import Markers, make_markers
from headrace.frontend.text.formats.values import (
    NoCallError,
    python_as_json,
    python_escaped,
    python_short_escape,
    within_text,
)

Reads = Generator[None, None, Any]
"""Yields when it needs more text, and returns what it read."""
Tell = Callable[[str], str | None]
"""Maps a new text to the output for it; None if the output is not certain yet."""
SPACE = " \t\r\n"
_IN_STRING = {'"': re.compile(r'[\x00-\x1f"\\]'), "'": re.compile(r"""[\x00-\x1f"'\\]""")}
"""What is not passed as it is, in a string with this quote."""
_IN_NEST = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_OUTSIDE = re.compile(r"""["'{}\[\]]""")
_TOKEN = re.compile(
    r""""[^"\\\x00-\x1f]*"|(?:[\s:{\[]|-?\d[\d.eE+\-]*(?=,)|,(?=\s*["{\[\d\-]))+|["'}\],]|[^\s"'{}\[\],:]+"""
)
"""Of a JSON value, outside of strings: a string in which nothing has to be mended, what else needs a look only at its
beginning, or one character, number or word that may be a slip."""
KEY = re.compile(r"([^\W\d][\w$.\-]{0,255})\s{0,64}:")
KEY_BEGUN = re.compile(r"[^\W\d][\w$.\-]{0,255}\s{0,64}")
"""A key without quotes, and what may become one."""
_WORD = re.compile(r"[\w.\-]{0,256}")
_VALUE = re.compile(r"[\"'{\[\-\d]|(?:true|false|null|True|False|None)\Z")
"""The beginning of a value, or a constant."""
_SIGNS = ("", *"\"'{}[],:")
"""What is no character of a number or word."""
_NO_VALUE_BEFORE = ("", *"{[,:")
"""What may be before a value or a key."""
_LONGEST_CONSTANT, _MOST_HELD = len("False"), 1024
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LONGEST_JSON_ESCAPE = len("\\ud83d")
_SCALAR_END = re.compile(r"[\s,}\]<\[]")
_PYTHON_STOP = re.compile(r"""["'()\[\]{},\\]""")
_PYTHON_ESCAPE = re.compile(
    r"x([0-9a-fA-F]{2})|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"
    r"|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.)"
)
"""A Python escape sequence, after its backslash."""
_SHORT_ESCAPES = re.compile(r"[^xuU0-7](?:\\[^xuU0-7])*", re.DOTALL)
"""Escape sequences of one character each, after the backslash of the first."""
_LONGEST_ESCAPE = len("ud83d\\ude00")
READ_AT_ONCE = 2048
"""Most characters added to the text at a time: taking from its beginning copies the rest, so it must stay short."""
_LONGEST_SCALAR = 4096
_ARGUMENT, _ARGUMENT_BEGUN = re.compile(r"[^\W\d]\w*\s*="), re.compile(r"[^\W\d]\w*\s*")
"""The name of an argument of a Python call, and the beginning of it."""
LONGEST_NAME = 300
"""Most characters that are held back as the name of a call or a parameter."""


class Stops(NamedTuple):
    """Markers by which a JSON value that is broken has ended."""

    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    """Those within strings, which may hold a marker as their text."""


NO_STOPS = Stops()


def as_it_is(text: str) -> str:
    return text


def _within_string(text: str, quote: str, *, is_all: bool) -> tuple[int, str]:
    """How many characters of `text` are next in a string with this quote, from a character that is not passed as it is,
    and what JSON has for them; its end is a double quote. 0 if that depends on text that has not arrived."""
    first = text[:1]
    if first == quote == "'":
        if len(text) == 1 and not is_all:
            return 0, ""
        return (1, "'") if text[1:2].isalnum() else (1, '"')  # an apostrophe within a word
    if first != "\\":
        return (1, '"') if first == quote else (len(first), within_text(first))
    if not is_all and len(text) < (_LONGEST_JSON_ESCAPE if text[1:2] == "u" else 2):
        return 0, ""
    if found := _ESCAPE.match(text):
        return found.end(), found.group()
    return (2, "'") if text[1:2] == "'" else (1, "\\\\")


def _or_begins(finds: Callable[[str], object], markers: Markers) -> Callable[[str], object]:
    return lambda text: finds(text) or markers.may_begin_in(text)


class PieceReader:
    """Holds text that has arrived and is not read yet, and has rules to read it."""

    def __init__(self) -> None:
        self._text, self._ended = "", False
        self._raw: list[str] | None = None
        """The text of a call whose name is not known yet; None outside of such a call."""
        self._stops: Callable[[str], object] | None = None
        """Finds text that the generator must read. A new text in which it finds nothing is passed to `_told` without
        running the generator, if all text before it has been read. None: the generator must read any text."""
        self._told: Tell = as_it_is

    @property
    def _is_over(self) -> bool:
        return self._ended and not self._text

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._raw is not None:
            self._raw.append(taken)
        return taken

    def _peek(self, count: int) -> Reads:
        """The next `count` characters, without taking them; fewer at the end of the answer."""
        while len(self._text) < count and not self._ended:
            yield
        return self._text[:count]

    def _skip_space(self) -> Reads:
        skipped = ""
        while True:
            rest = self._text.lstrip(SPACE)
            skipped += self._take(len(self._text) - len(rest))
            if rest or self._ended:
                return skipped
            yield

    def _accept(self, literal: str) -> Reads:
        """Takes the literal if it comes next; returns whether it did."""
        while len(self._text) < len(literal) and literal.startswith(self._text) and not self._ended:
            yield
        if not self._text.startswith(literal):
            return False
        self._take(len(literal))
        return True

    def _expect(self, literal: str) -> Reads:
        if not (yield from self._accept(literal)):
            raise NoCallError

    def _turn(self, stops: Callable[[str], object], told: Tell | None) -> Reads:
        """Waits for text that the generator must read. Text in which `stops` finds nothing goes to `told`, if given."""
        if told is not None and not self._text:
            self._stops, self._told = stops, told
        yield
        self._stops = None

    def _until(
        self,
        markers: Markers,
        give: Callable[[str], None],
        *,
        told: Tell | None = None,
        stops: Callable[[str], object] | None = None,
        is_value: bool = False,
    ) -> Reads:
        """Passes the text before the first marker to `give`, and returns the marker; None at the end of the answer.

        told: the output of `give` for a text in which `stops` (by default: a marker's first character) finds nothing.
        is_value: an incomplete marker at the end of the answer is dropped instead of given."""
        while True:
            found = markers.find(self._text, is_over=self._ended)
            if found is not None:
                if found.start():
                    give(self._take(found.start()))
                self._take(len(found.group()))
                return found.group()
            is_all = self._ended and not is_value
            certain = len(self._text) - (0 if is_all else markers.held(self._text))
            if certain:
                give(self._take(certain))
            if self._ended:
                self._text = ""
                return None
            yield from self._turn(stops or markers.may_begin_in, told)

    def _until_end_of_text(self, ends: Markers, give: Callable[[str], None]) -> Reads:
        """`_until` for a value that `give` emits as a part of a JSON string."""
        return (yield from self._until(ends, give, told=as_it_is, stops=ends.may_begin_or_is_escaped, is_value=True))

    def _short_until(self, marker: str) -> Reads:
        """Takes a name or key up to `marker`, and the marker. Raises NoCallError if it has over 300 characters."""
        text: str = yield from self._short_before(marker)
        self._take(len(marker))
        return text

    def _short_before(self, marker: str, ends: Sequence[str] = ()) -> Reads:
        """`_short_until` without the marker. ends: markers before which it must come."""
        while (at := self._text.find(marker)) < 0:
            if self._ended or len(self._text) > LONGEST_NAME or any(each in self._text for each in ends):
                raise NoCallError
            yield
        if at > LONGEST_NAME or any(0 <= self._text.find(each) < at for each in ends):
            raise NoCallError
        return self._take(at)

    def _json_string(self) -> Reads:
        if (yield from self._peek(1)) not in ('"', "'"):
            raise NoCallError
        text = yield from self._json_whole()
        try:
            said: str = json.loads(text, strict=False)
            said.encode()  # half of a surrogate pair is no text
        except ValueError:
            raise NoCallError from None
        return said

    def _key(self, *, needs_quotes: bool) -> Reads:
        """Takes the key of an object's member, and its colon. Returns it, and whether it has quotes."""
        if has_quotes := (yield from self._peek(1)) in ('"', "'"):
            key = yield from self._json_string()
            yield from self._skip_space()
            yield from self._expect(":")
        else:
            if needs_quotes:
                raise NoCallError
            while (found := KEY.match(self._text)) is None:
                if self._ended or not KEY_BEGUN.fullmatch(self._text):
                    raise NoCallError
                yield
            key = found[1]
            self._take(found.end())
        yield from self._skip_space()
        return key, has_quotes

    def _word(self) -> Reads:
        """Takes a name without quotes; empty if none comes next."""
        while _WORD.fullmatch(self._text) and not self._ended:
            yield
        found = _WORD.match(self._text)
        assert found is not None
        return self._take(found.end())

    def _json_whole(self) -> Reads:
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return "".join(parts)

    def _scalar(self) -> Reads:
        """Takes a number or a word, up to white space, a comma or a bracket, or the end of the answer."""
        while (end := _SCALAR_END.search(self._text)) is None and not self._ended:
            if len(self._text) > _LONGEST_SCALAR:
                raise NoCallError
            yield
        return self._take(len(self._text) if end is None else end.start())

    def _json_value(self, give: Callable[[str], None], *, told: Tell | None = None, stops: Stops = NO_STOPS) -> Reads:
        """Passes one value to `give` while it arrives, as JSON. What models write by mistake is mended: single quotes,
        keys without quotes, commas that are missing or before a closing bracket, Python's constants, and in strings
        line breaks and backslashes that are not escaped. Everything else is passed as it is. Raises NoCallError if the
        answer ends within it.

        told: as in `_until`, within strings. stops: NoCallError if one comes within the value, which is passed up to
        there."""
        if (first := (yield from self._peek(1))) and first not in "\"'{[":
            scalar: str = yield from self._scalar()
            give(_CONSTANTS.get(scalar, scalar))
            return
        ends, depth, held, parts = make_markers(stops.outside), 0, "", list[str]()  # held: white space and a comma
        last, is_apart = "", False  # the last character but white space, and whether that came since
        while True:
            text, is_all = self._before(ends)
            at = 0
            while found := _TOKEN.match(text, at):
                token = found.group().lstrip()
                space, lead = found.group()[: len(found.group()) - len(token)], token[:1]
                is_apart = is_apart or bool(held or space)
                goes_on = not (is_apart or lead in _SIGNS or last in _SIGNS or last in _NO_VALUE_BEFORE)
                key = None
                if lead not in _SIGNS and not goes_on:
                    key = None if last == ":" else KEY.match(text, at)
                    is_cut = found.end() == len(text) and token.isalpha() and len(token) <= _LONGEST_CONSTANT
                    if not is_all and (is_cut or (last != ":" and KEY_BEGUN.fullmatch(text, at))):
                        break
                at = found.end()
                if token in ("", ",") and len(held) < _MOST_HELD:
                    held += space + ("" if "," in held else token)
                    last = token or last
                    continue
                if lead == "," in held:
                    token = token[1:]
                if token in ("]", "}"):
                    held = held.replace(",", "")
                lacks_comma = last not in _NO_VALUE_BEFORE and not goes_on and (key or _VALUE.match(token))
                parts.append(("," if lacks_comma else "") + held + space)
                held, last, is_apart = "", token.rstrip()[-1:] or last, found.group()[-1].isspace()
                if token in ('"', "'"):
                    self._take(at)
                    parts.append('"')
                    yield from self._string(token, parts, give, told, stops.inside)
                    (text, is_all), at = self._before(ends), 0
                    last = '"'
                elif goes_on or not token:
                    parts.append(token)
                else:
                    parts.append(f'"{key[1]}"' if key else _CONSTANTS.get(token, token))
                    if token[0] != '"':
                        depth += token.count("{") + token.count("[") - (token in ("]", "}"))
                if depth <= 0:
                    self._take(at)
                    give("".join(parts))
                    return
            self._take(at)
            if said := "".join((*parts, held.partition(",")[0] if is_all else "")):
                give(said)
            parts.clear()
            if is_all:
                raise NoCallError
            yield

    def _before(self, ends: Markers) -> tuple[str, bool]:
        """The text before a marker, and whether there is no more of it to come."""
        found = ends.find(self._text, is_over=True)
        if found is not None:
            return self._text[: found.start()], True
        return self._text[: len(self._text) - (0 if self._ended else ends.held(self._text))], self._ended

    def _string(
        self, quote: str, parts: list[str], give: Callable[[str], None], told: Tell | None, stops: tuple[str, ...]
    ) -> Reads:
        """The rest of a string of `_json_value`, after its quote. Adds to `parts`, and passes those to `give` before
        it waits for more text."""
        finds, ends = _IN_STRING[quote].search, make_markers(stops)
        while True:
            text, is_all = self._before(ends)
            at = 0
            while (found := finds(text, at)) is not None:
                parts.append(text[at : found.start()])
                at = found.start()
                taken, said = _within_string(text[at : at + _LONGEST_JSON_ESCAPE], quote, is_all=is_all)
                if not taken:
                    break
                at += taken
                parts.append(said)
                if said == '"':
                    self._take(at)
                    return
            if found is None:
                parts.append(text[at:])
                at = len(text)
            self._take(at)
            if any(parts):
                give("".join(parts))
            parts.clear()
            if is_all:
                raise NoCallError
            yield from self._turn(_or_begins(finds, ends) if stops else finds, told)

    def _nest(self, give: Callable[[str], None], ends: Markers) -> Reads:
        """An object or a list, as JSON or as a Python literal. ends: markers that end what is neither, outside of its
        strings."""
        depth, quote, last = 0, "", ""
        while True:
            text, at = self._text, 0
            end = ends.find(text, is_over=True)
            while at < len(text):
                if quote:
                    next_one = _IN_NEST[quote].search(text, at)
                    at = len(text) if next_one is None else next_one.start()
                    if next_one is None:
                        break
                    if next_one.group() == "\\":
                        if at + 2 > len(text):
                            break  # the escaped character has not arrived yet
                        at += 2
                        continue
                    quote, at = "", at + 1
                else:
                    if end is not None and end.start() < at:
                        end = ends.find(text, at, is_over=True)
                    next_one = _OUTSIDE.search(text, at)
                    if end is not None and (next_one is None or end.start() < next_one.start()):
                        give(self._take(end.start()))
                        return
                    if next_one is None:
                        at = max(at, len(text) - (0 if self._ended else ends.held(text)))
                        break
                    at = next_one.end()
                    before = text[next_one.start() - 1] if next_one.start() else last
                    if next_one.group() == "'" and before.isalnum():
                        continue
                    quote = next_one.group() if next_one.group() in _IN_NEST else ""
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(next_one.group(), 0)
                if depth <= 0 and not quote:
                    give(self._take(at))
                    return
            if at:
                last = text[at - 1]
                give(self._take(at))
            if self._ended:
                if self._text:
                    give(self._take(len(self._text)))
                raise NoCallError
            yield

    def _python_text(self, give: Callable[[str], None]) -> Reads:
        """Emits the content of a Python string, or of several in a row, as parts of a JSON string while it arrives.

        Raises NoCallError if the answer ends within it."""
        while (yield from self._peek(1)) in ("'", '"'):
            quote = self._text[0]
            if (yield from self._peek(3)) == quote * 3:
                quote *= 3
            self._take(len(quote))
            ends, joins = make_markers((quote, "\\")), True
            while (stop := (yield from self._until_end_of_text(ends, give))) is not None:
                if stop == quote:
                    if len(quote) == 3 or (yield from self._ends_python_text(joins=joins)):
                        break
                    give(within_text(quote))
                    joins = False
                    continue
                yield from self._peek(1)
                if run := _SHORT_ESCAPES.match(self._text):
                    give("".join(map(python_short_escape, self._take(run.end())[::2])))
                    continue
                escape = _PYTHON_ESCAPE.match((yield from self._peek(_LONGEST_ESCAPE)))
                if escape is None:
                    raise NoCallError
                self._take(escape.end())
                give(python_escaped(*escape.groups()))
            if stop is None:
                raise NoCallError
            yield from self._skip_space()

    def _ends_python_text(self, *, joins: bool) -> Reads:
        """Whether a quote ends its string, by what follows: models do not escape all quotes within commands. joins:
        another string may follow, as Python joins strings in a row."""
        while True:
            rest = self._text.lstrip(SPACE)
            lead, after = rest[:1], rest[1:] if rest[:1] == ")" else rest[1:].lstrip(SPACE)
            is_decided = lead not in ",)" or (after and (lead == ")" or not _ARGUMENT_BEGUN.fullmatch(after)))
            if (lead and is_decided) or self._ended or len(self._text) > LONGEST_NAME:
                break
            yield
        if lead == ",":
            is_cut = self._ended and _ARGUMENT_BEGUN.fullmatch(after)
            return bool(not after or is_cut or after[0] == ")" or _ARGUMENT.match(after))
        if lead == ")":
            return not after.startswith((")", "'", '"'))
        return not lead or (joins and lead in "\"'")

    def _python_value(self) -> Reads:
        """Takes a Python literal up to the comma or parenthesis after it, and returns it as JSON."""
        parts: list[str] = []
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
                    parts.append(self._take(at - 1))
                    return python_as_json("".join(parts))
                else:
                    depth += 1 if found in "([{" else -1 if found in ")]}" else 0
            if self._ended:
                raise NoCallError
            num_read = len(self._text)
            at = max(at - num_read, 0)  # 1 if the character after a backslash at the end is still to come
            parts.append(self._take(num_read))
            yield
