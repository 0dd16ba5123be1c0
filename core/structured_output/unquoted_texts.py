r"""Texts without quotes in grammars of tool calls, which go up to their first end marker, in each library's notation.

A rule of a Lark grammar declares one, on a line of its own:

    NAME: %text {"end": "</arg_value>", "minLength": 1, "maxLength": 2000, "pattern": "[a-z]+", "line_break": true}

An end marker before the text has its least length is no end that a reader would skip, so it must not occur there; a
rule that ends at its first match takes care of the others. With `line_break`, a line break before the end marker is no
part of the text, and may be left out.

llguidance counts within its lexer, whose states are limited. So a longer text is a row of lexemes (`_Rows`), each of
as many characters, whose states are the same for each of them:

    text      up to the first end | CHUNK no part of an end follows   text_1_0
                                  | CHUNK "<" is its last character   text_1_1
                                  | CHUNK "</" are its last ones      text_1_2 ...
    text_1_1  up to the first end, which "<" begins | CHUNK ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated

import msgspec

from headrace.ipc.struct_types import threadsafe

_DECLARED = re.compile(r"^(\w+): %text (\{.*\})$", re.MULTILINE)
CHUNK = 64
"""Fewest characters that one of llguidance's lexemes counts: its lexer has some ten states for each, and derives them
all within one step where known tokens are accepted again without masks."""
MOST_ROWS = 200
"""Most rows of a text, which the library reads by recursion."""
MOST_LENGTH = 100_000
"""Longest maxLength of a text that llguidance counts."""
MOST_LEAST = 800
"""Longest minLength that one lexeme counts."""
MOST_LEAST_STATES = 18_000
"""Most of a minLength times the square of the end marker's length where a first row counts it."""
MOST_OF_XGRAMMAR = 128
"""Most characters that xgrammar counts in a rule that ends at its first marker."""

MOST_BESIDE_PATTERN = 4096
"""Longest bound of a text that has a pattern: one lexeme counts it, whose states are limited."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class UnquotedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    end: str = ""
    """"" where a special token follows, which no text contains."""
    min_length: _Count = msgspec.field(default=0, name="minLength")
    max_length: _Count | None = msgspec.field(default=None, name="maxLength")
    pattern: str | None = None
    """An expression for the whole text, as between slashes."""
    line_break: bool = False

    @property
    def times(self) -> str:
        return _times(self.min_length, self.max_length)

    @property
    def may_be_empty(self) -> bool:
        if self.min_length or self.pattern is None:
            return not self.min_length
        try:
            return re.fullmatch(self.pattern, "") is not None
        except (re.error, OverflowError):  # which the library will say
            return False


def with_texts(lark: str, write: Callable[[str, UnquotedText], str]) -> str:
    """Replaces the declared texts of a grammar by what `write` makes of a rule's name and its text. Raises
    ValueError."""

    def written(found: re.Match[str]) -> str:
        try:
            text = msgspec.json.decode(found[2], type=threadsafe(UnquotedText))
        except msgspec.MsgspecError as error:
            raise ValueError(f"%text of {found[1]}: {error}") from None
        if text.max_length is not None and text.min_length > text.max_length:
            raise ValueError(f"no text has a minLength of {text.min_length} and a maxLength of {text.max_length}")
        return write(found[1], text)

    return _DECLARED.sub(written, lark)


def for_xgrammar(name: str, text: UnquotedText) -> str:
    """Raises ValueError for bounds that the library cannot apply."""
    if not text.end:
        return _before_special(name, text, "")
    for keyword, value in (("minLength", text.min_length), ("pattern", text.pattern)):
        if value:
            raise ValueError(f"it does not follow {keyword} in a text without quotes")
    if (text.max_length or 0) > MOST_OF_XGRAMMAR:
        raise ValueError(
            f"it does not follow a maxLength of {text.max_length} in a text without quotes; at most {MOST_OF_XGRAMMAR}"
        )
    line = r"\n?" if text.line_break and text.max_length is not None else ""
    return f"{name}[suffix={json.dumps(text.end, ensure_ascii=False)}]: /{text.times}{line}/"


def for_llguidance(name: str, text: UnquotedText) -> str:
    """Raises ValueError for bounds that the library cannot apply."""
    if text.pattern is not None:
        return _of_pattern(name, text) if text.end else _before_special(name, text, f" & /{text.pattern}{_line(text)}/")
    if not text.end and (text.line_break or (text.max_length or 0) <= CHUNK):
        return _before_special(name, text, "")
    return _Rows(name, text).written()


def _of_pattern(name: str, text: UnquotedText) -> str:
    """A text within one lexeme. Raises ValueError for bounds that it cannot count."""
    if max(text.min_length, text.max_length or 0) > MOST_BESIDE_PATTERN:
        raise ValueError(
            "a text without quotes that has a pattern cannot have a minLength or maxLength above "
            f"{MOST_BESIDE_PATTERN}; leave one of the keywords out"
        )
    end, line, any_text = regex(text.end), _line(text), r"/(.|\n)*/"
    counted = rf"/{text.times}{line}{end}/"
    if not (text.pattern or "").endswith(r"(.|\n)*") or line or text.min_length:
        # The first end is where the pattern must end, so one before is excluded beside it.
        return rf"{name}[lazy]: {counted} & /{text.pattern}{line}{end}/ & ~/(.|\n)*{end}(.|\n)+/"
    # A text that fits the pattern may go on in any way, so only ends before it fits are excluded: beside a count of
    # thousands, others would take too many states.
    return f"{name}[lazy]: {counted} & /{text.pattern}/ & ~(({any_text} & ~/{text.pattern}/) /{end}/ {any_text})"


def _before_special(name: str, text: UnquotedText, pattern: str) -> str:
    terminal, line = f"{name}_whole".upper(), _line(text)
    is_optional = "?" if text.may_be_empty and not line else ""
    return f"{name}: ({terminal}){is_optional}\n{terminal}: /{text.times}{line}/{pattern}"


class _Rows:
    """llguidance's rules of a text in rows of lexemes. A state is how many characters of the end marker precede."""

    def __init__(self, name: str, text: UnquotedText) -> None:
        self._name, self._end, self._line = name, text.end, text.line_break
        # With the line break, the shortest text has a character more; the longest may have.
        self._least = text.min_length + (1 if text.line_break and text.min_length else 0)
        self._most = text.max_length
        self._lines, self._named, self._num_rows = list[str](), dict[object, str](), 0
        size = max(1, len(text.end))
        most_least = MOST_LEAST_STATES // size**2 if self._has_first_row else MOST_LEAST
        if self._least > most_least:
            beside = "" if self._most is None else f" and a maxLength of {self._most}"
            raise ValueError(
                f"a text without quotes cannot have a minLength of {text.min_length}{beside} up to {text.end!r:.100}; "
                f"of such texts minLength may be {most_least - text.line_break}"
            )
        if (text.max_length or 0) > MOST_LENGTH:
            raise ValueError(
                f"a text without quotes cannot have a maxLength of {text.max_length}, at most {MOST_LENGTH}; leave it "
                "out for any length"
            )

    @property
    def _size(self) -> int:
        """The characters of a chunk."""
        return max(CHUNK, len(self._end), (self._most or 0) // MOST_ROWS)

    @property
    def _has_first_row(self) -> bool:
        """The least length is counted by a row of its own; else the only lexeme counts both lengths."""
        most = self._most or 0
        return bool(self._least) and most > self._size and most - self._least > len(self._end) + 1

    def written(self) -> str:
        size, states = len(self._end), {0: self._name}
        # With the end marker.
        least, left = self._least and self._least + size, None if self._most is None else self._most + size
        if self._has_first_row:
            # An end marker within these would be too early, so they need no count of their own to exclude it.
            first = self._least + max(0, size - 1)
            states, least, left = self._row(states, first, is_least=True), 0, (left or 0) - first
        while not least and left is not None and left > self._size + size + 1:
            states, left = self._row(states, self._size), left - self._size
        for state, name in states.items():
            self._lines.append(f"{name}: {self._last(state, least, left, is_longest=True)}")
        return "\n".join(self._lines)

    def _row(self, states: dict[int, str], num: int, *, is_least: bool = False) -> dict[int, str]:
        """The rules of these states, up to those that it returns, so many characters later."""
        self._num_rows += 1
        row = f"{self._name}_{self._num_rows}"
        following = {state: f"{row}_{state}" for state in range(max(1, len(self._end)))}
        ways = (f"{self._chunk(state, num, is_least=is_least)} {name}" for state, name in following.items())
        self._lines.append(f"{row}: {' | '.join(ways)}")
        most = num if self._end else num - 1
        for state, name in states.items():
            self._lines.append(f"{name}: {'' if is_least else f'{self._last(state, 0, most)} | '}{row}")
        return following

    def _last(self, state: int, least: int, most: int | None, *, is_longest: bool = False) -> str:
        """The rest of the text with its end marker, of so many characters together."""
        if not self._end:
            if most == 0:
                return '""'
            name = self._lexeme(("last", least, most), f"/{_times(max(1, least), most)}/")
            return name if least else f"({name})?"
        key, size = ("last", state, least, most), len(self._end)
        if key in self._named:
            return self._named[key]
        low, high = max(0, least - size), None if most is None else most - size
        line = r"\n?" if self._line and is_longest and high is not None else ""
        if high is not None and low > high:
            low, line = high, r"\n"  # minLength is maxLength
        # Lexemes of their own: after those of the states, the lexer is where it is in state 0.
        rests = [each for number, each in self._rests(state) if most is None or number <= most]
        ways = [self._lexeme(("rest", each), f"/{each}/", is_lazy=True) for each in rests]
        early = rf" & ~/{_times(0, low - 1)}{regex(self._end)}(.|\n)*/" if least > size else ""
        if high is None or high >= 0:
            whole = f"/{_times(low, high)}{line}{regex(self._end)}/{early}"
            ways.append(self._lexeme(("whole", low, high, line), whole, is_lazy=True))
        self._named[key] = f"({' | '.join(ways)})"
        return self._named[key]

    def _chunk(self, state: int, num: int, *, is_least: bool) -> str:
        """So many characters, of which the last `state` begin an end marker. is_least: there is no whole one."""
        key = ("chunk", state, num, is_least)
        if key in self._named:
            return self._named[key]
        # Only the last characters are compared, as the lexer derives expressions for each character that is.
        most = max(0, len(self._end) - 1)
        body = f"/{_times(most - state, most - state)}{regex(self._end[:state])}/"
        longer = [number for number in range(state + 1, len(self._end)) if self._ends_in(number, state)]
        if longer:
            body += rf" & ~/(.|\n)*({'|'.join(regex(self._end[:number]) for number in longer)})/"
        body = f"/{_times(num - most, num - most)}/ ({body})" if most else f"/{_times(num, num)}/"
        if is_least and self._end:
            body = rf"({body}) & ~/(.|\n)*{regex(self._end)}(.|\n)*/"
        return self._lexeme(key, body)

    def _rests(self, state: int) -> list[tuple[int, str]]:
        """What completes an end marker of which `state` characters precede, each with its length."""
        begun = [number for number in range(state, 0, -1) if self._ends_in(state, number)]
        return [(len(self._end) - number, regex(self._end[number:])) for number in begun]

    def _ends_in(self, longer: int, shorter: int) -> bool:
        """Whether the marker's first `longer` characters end in its first `shorter` ones."""
        return self._end[:longer].endswith(self._end[:shorter])

    def _lexeme(self, key: object, body: str, *, is_lazy: bool = False) -> str:
        if key not in self._named:
            name = f"{self._name}_part_{len(self._named)}"
            self._named[key] = name if is_lazy else name.upper()
            self._lines.append(f"{name}[lazy]: {body}" if is_lazy else f"{name.upper()}: {body}")
        return self._named[key]


def regex(text: str) -> str:
    """An expression between slashes for a text."""
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text).replace("\n", r"\n")


def _line(text: UnquotedText) -> str:
    return r"\n" if text.line_break else ""


def _times(least: int, most: int | None) -> str:
    """So many characters. Without a bound it is a star or a plus: where a group repeats by a count, and be it {0,},
    xgrammar looks at each token of the vocabulary anew for each mask."""
    if most is None and least <= 1:
        return r"(.|\n)+" if least else r"(.|\n)*"
    return rf"(.|\n){{{least},{'' if most is None else most}}}"
