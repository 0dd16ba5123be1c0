"""GBNF, llama.cpp's notation of grammars, read as llama.cpp reads it.

`normalised` writes a grammar so that a library with the same notation has nothing left to interpret;
`core/structured_output/gbnf_in_lark.py` writes it for llguidance.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = "root"
MOST_DEPTH = 100
"""Groups within groups."""

Ranges = tuple[tuple[int, int], ...]


class Node(NamedTuple):
    """An expression. Expressions are numbered, equal ones have one number, and a part's is below that of its whole."""

    kind: str
    """set, text (of several sets), name, sequence, alternatives or repeat"""
    parts: tuple[int, ...] = ()
    value: Any = None
    """The `Ranges` that a set takes; the text; the rule's name; (least, most or None for any number)."""


class Grammar:
    """Expressions, and the rules that are made of them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.rules: dict[str, int] = {}
        self._numbers: dict[Node, int] = {}

    def add(self, kind: str, parts: Sequence[int] = (), value: Any = None) -> int:
        if kind in ("sequence", "alternatives") and len(parts) == 1:
            return parts[0]
        if kind == "repeat" and value == (0, 0):
            return self.add("sequence")
        node = Node(kind, tuple(parts), value)
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def below(self, number: int) -> tuple[int, ...]:
        """The parts of an expression; of a name, its rule's expression."""
        node = self.nodes[number]
        return (self.rules[node.value],) if node.kind == "name" else node.parts

    def least(self, bottom: Any, value_of: Callable[[Node, list[Any]], Any]) -> list[Any]:
        """The least solution of value = value_of(node, values of its parts) over all expressions."""
        wholes = [list[int]() for _ in self.nodes]
        for number in range(len(self.nodes)):
            for part in self.below(number):
                wholes[part].append(number)
        values, waiting = [bottom] * len(self.nodes), deque(range(len(self.nodes)))
        is_waiting = [True] * len(self.nodes)
        while waiting:
            number = waiting.popleft()
            is_waiting[number] = False
            value = value_of(self.nodes[number], [values[part] for part in self.below(number)])
            if value != values[number]:
                values[number] = value
                for whole in wholes[number]:
                    if not is_waiting[whole]:
                        is_waiting[whole] = True
                        waiting.append(whole)
        return values


# --- reading ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*+)++)|(?P<rule>[\w-]++)(?=(?:\s|\#[^\r\n]*+)*+::=)|(?P<is>::=)|(?P<name>[\w-]++)
    |(?P<text>"(?:\\.|[^"\\\r\n])*+")|(?P<set>\[(?:\\.|[^\]\\])*+\])
    |(?P<times>[*+?]|\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?\})
    |(?P<sign>[|().])""",
    re.VERBOSE | re.DOTALL,
)
"""Nothing in it is tried a second time in another way (`*+`), so a text is read in time that grows with its length."""
_OF_TOKENS = re.compile(r"!?<[^<>\s]{1,100}>")
"""llama.cpp's references to a token by its number in brackets or its text, also to any but that one."""
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
ALL: Ranges = ((0, 0xD7FF), (0xE000, sys.maxunicode))


def read(text: str) -> Grammar:
    """Raises ValueError with the line of what cannot be read."""
    return _without_barren(_Reader(text).grammar)


class _Reader:
    def __init__(self, text: str) -> None:
        self.grammar = Grammar()
        self._text, self._at = text, 0
        self._depth = 0
        self._next()
        while self._kind:
            self._rule()
        if ROOT not in self.grammar.rules:
            raise ValueError(f"there is no rule {ROOT}, with which an answer begins")
        for node in self.grammar.nodes:
            if node.kind == "name" and node.value not in self.grammar.rules:
                raise ValueError(f"there is no rule {node.value}, to which another one refers")

    def _next(self) -> None:
        self._kind, self._value = "", ""
        while self._at < len(self._text):
            found = _TOKEN.match(self._text, self._at)
            if found is None:
                if (token := _OF_TOKENS.match(self._text, self._at)) is not None:
                    raise self._wrong(
                        f"{token[0]} refers to a token, which grammars cannot do here: write a token's text in quotes, "
                        "which may be the token itself"
                    )
                raise self._wrong(f"{self._text[self._at : self._at + 12]!r} cannot be read")
            self._kind, self._value, self._at = found.lastgroup or "", found[0], found.end()
            if self._kind != "space":
                return
        self._kind = self._value = ""

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self._at) + 1}: {why}")

    def _rule(self) -> None:
        name = self._value
        if self._kind != "rule":
            raise self._wrong(f"{name!r} stands where a rule, NAME ::=, was expected")
        if name in self.grammar.rules:
            raise self._wrong(f"the rule {name} is defined a second time")
        self._next()
        self._next()
        self.grammar.rules[name] = self._alternatives()

    def _alternatives(self) -> int:
        found = [self._sequence()]
        while self._value == "|":
            self._next()
            found.append(self._sequence())
        return self.grammar.add("alternatives", found)

    def _sequence(self) -> int:
        found = list[int]()
        while self._kind and self._kind not in ("rule", "is") and self._value not in ("|", ")"):
            if self._kind == "times":
                raise self._wrong(f"{self._value} repeats nothing")
            found.append(self._repeated(self._part()))
        return self.grammar.add("sequence", found)

    def _repeated(self, part: int) -> int:
        while self._kind == "times":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._value) or self._counts()
            part = self.grammar.add("repeat", (part,), (least, most))
            self._next()
        return part

    def _counts(self) -> tuple[int, int | None]:
        least, comma, most = self._value[1:-1].replace(" ", "").strip().partition(",")
        if not least.strip() and not most.strip():
            raise self._wrong(f"{self._value} has no number")
        first = int(least or 0)
        last = int(most) if most.strip() else None if comma else first
        if last is not None and last < first:
            raise self._wrong(f"{self._value} is at most less than at least")
        return first, last

    def _part(self) -> int:
        kind, value = self._kind, self._value
        if kind == "text":
            codes = [code for code, _ in self._codes(value[1:-1])]
            sets = [self.grammar.add("set", (), ((code, code),)) for code in codes]
            text = "".join(map(chr, codes))
            part = self.grammar.add("text", sets, text) if len(sets) > 1 else self.grammar.add("sequence", sets)
        elif kind == "set":
            part = self.grammar.add("set", (), self._set(value))
        elif kind == "name":
            part = self.grammar.add("name", (), value)
        elif value == ".":
            part = self.grammar.add("set", (), ALL)
        else:
            self._depth += 1
            if self._depth > MOST_DEPTH:
                raise self._wrong(f"groups stand within more than {MOST_DEPTH} others")
            self._next()
            part = self._alternatives()
            self._depth -= 1
            if self._value != ")":
                raise self._wrong("a group has no ) at its end")
        self._next()
        return part

    def _codes(self, written: str) -> Iterator[tuple[int, bool]]:
        """Code points, and whether each was escaped."""
        for two, four, eight, escaped, plain in _ESCAPE.findall(written):
            if escaped and escaped.isalnum() and escaped not in _CONTROLS:
                raise self._wrong(rf"\{escaped} is no escape; there are \n, \r, \t, \xHH, \uHHHH and \UHHHHHHHH")
            digits = two or four or eight
            code = int(digits, 16) if digits else ord(_CONTROLS.get(escaped, escaped) or plain)
            if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
                raise self._wrong(rf"\{'u' if four else 'U'}{digits} is no character")
            yield code, not plain

    def _set(self, written: str) -> Ranges:
        is_negated = written.startswith("[^")
        codes = list(self._codes(written[1 + is_negated : -1]))
        if not codes:
            raise self._wrong(rf"the set {written} is empty; for the character write \]")
        at, ranges = 0, list[tuple[int, int]]()
        while at < len(codes):
            first = last = codes[at][0]
            if at + 2 < len(codes) and codes[at + 1] == (ord("-"), False):
                last = codes[at + 2][0]
                at += 2
                if last < first:
                    raise self._wrong(f"the set {written} has a range whose end is before its beginning")
            ranges.append((first, last))
            at += 1
        if not (found := _rest(_rest(ranges)) if not is_negated else _rest(ranges)):
            raise self._wrong(f"the set {written} takes no character")
        return found


def _rest(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All characters that are not in the ranges."""
    at, found = 0, list[tuple[int, int]]()
    for first, last in sorted([*ranges, (0xD800, 0xDFFF), (sys.maxunicode + 1, sys.maxunicode + 1)]):
        if first > at:
            found.append((at, first - 1))
        at = max(at, last + 1)
    return tuple(found)


def _without_barren(grammar: Grammar) -> Grammar:
    """The grammar without alternatives that no text ends, as those of x ::= "a" x: an answer could not leave them."""

    def is_fertile(node: Node, parts: list[bool]) -> bool:
        if node.kind == "repeat":
            return node.value[0] == 0 or parts[0]
        return any(parts) if node.kind == "alternatives" else all(parts)

    fertile = grammar.least(False, is_fertile)
    if not fertile[grammar.rules[ROOT]]:
        raise ValueError(f"no text is of the rule {ROOT}: each alternative leads back to itself")
    found, numbers = Grammar(), dict[int, int]()
    for number, node in enumerate(grammar.nodes):
        if fertile[number]:
            parts = [numbers[part] for part in node.parts if fertile[part]]
            is_empty = node.kind == "repeat" and not parts
            numbers[number] = found.add("sequence") if is_empty else found.add(node.kind, parts, node.value)
    found.rules = {name: numbers[number] for name, number in grammar.rules.items() if fertile[number]}
    return found


# --- writing ----------------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """The grammar in the same notation, with rules that are named by numbers. Raises ValueError."""
    grammar = read(text)
    names = {name: ROOT if name == ROOT else f"r{nth}" for nth, name in enumerate(grammar.rules)}
    written = list[str]()
    for node in grammar.nodes:
        match node.kind:
            case "text":
                written.append(f'"{"".join(_escaped(ord(each)) for each in node.value)}"')
            case "set":
                rest = _rest(node.value)
                is_short = len(node.value) <= len(rest) or not rest
                written.append(set_text(node.value if is_short else rest, _escaped, is_negated=not is_short))
            case "name":
                written.append(names[node.value])
            case _:
                written.append(compound(node, written))
    return "\n".join(f"{names[name]} ::= {written[number]}" for name, number in grammar.rules.items())


def compound(node: Node, written: Sequence[str]) -> str:
    parts = [written[part] for part in node.parts]
    if node.kind == "sequence":
        return f"({' '.join(parts)})" if parts else '""'
    if node.kind == "alternatives":
        return f"({' | '.join(parts)})"
    least, most = node.value
    counts = f"{{{least},}}" if most is None else f"{{{least},{most}}}"
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(node.value, counts)
    return f"({parts[0]}){sign}"


def _escaped(code: int) -> str:
    """A character in a text or a set, whatever stands beside it."""
    character = chr(code)
    if character in '"\\[]^-':
        return f"\\{character}"
    return character if character.isprintable() or code > 0xFFFF else rf"\u{code:04x}"


def set_text(ranges: Ranges, write: Callable[[int], str], *, is_negated: bool = False) -> str:
    written = (write(first) if first == last else f"{write(first)}-{write(last)}" for first, last in ranges)
    return f"[{'^' if is_negated else ''}{''.join(written)}]"
