"""GBNF, llama.cpp's notation of grammars, read as llama.cpp reads it and written for each library.

`normalised` writes a grammar so that a library with the same notation has nothing left to interpret. `in_lark` writes
it for llguidance, which divides a text into terminals, each as long as it can be, before it parses. That takes the same
texts only if no terminal could also end earlier, where something may follow that begins like its rest. So terminals are
chosen that do not collide so: where two do, the longer one is taken apart, in the end into single characters. Those
never collide, as no character is the beginning of another.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = "root"
MOST_DEPTH = 100
"""Groups within groups."""
MOST_POSITIONS = 600
"""Characters of a terminal whose collisions are looked for, repetitions written out; a larger one is taken apart."""
MOST_WRITTEN_OUT = 64
"""Characters of a repetition that are written out for that; beyond, it counts as any number of them."""
MOST_CLASSES = 2000
"""Classes of characters that the search tells apart."""
MOST_WORK = 50_000
"""Steps of that search, of about a microsecond; a grammar that needs more is written in single characters."""

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
        values, waiting = [bottom] * len(self.nodes), dict.fromkeys(range(len(self.nodes)))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            value = value_of(self.nodes[number], [values[part] for part in self.below(number)])
            if value != values[number]:
                values[number] = value
                waiting.update(dict.fromkeys(wholes[number]))
        return values


# --- reading ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)|(?P<rule>[\w-]+)(?=(?:\s|\#[^\r\n]*)*::=)|(?P<is>::=)|(?P<name>[\w-]+)
    |(?P<text>"(?:\\.|[^"\\\r\n])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<times>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|().])""",
    re.VERBOSE | re.DOTALL,
)
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
                written.append(_set_text(node.value if is_short else rest, _escaped, is_negated=not is_short))
            case "name":
                written.append(names[node.value])
            case _:
                written.append(_compound(node, written))
    return "\n".join(f"{names[name]} ::= {written[number]}" for name, number in grammar.rules.items())


def in_lark(text: str) -> str:
    """The grammar in llguidance's notation, which takes the same texts. Raises ValueError."""
    grammar = read(text)
    return _Lark(grammar, _terminals(grammar)).text


def _compound(node: Node, written: Sequence[str]) -> str:
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


def _in_expression(code: int) -> str:
    return rf"\x{{{code:x}}}"


def _set_text(ranges: Ranges, write: Callable[[int], str], *, is_negated: bool = False) -> str:
    written = (write(first) if first == last else f"{write(first)}-{write(last)}" for first, last in ranges)
    return f"[{'^' if is_negated else ''}{''.join(written)}]"


class _Lark:
    """Writes a grammar whose terminals are chosen."""

    def __init__(self, grammar: Grammar, terminals: set[int]) -> None:
        self._grammar, self._terminals = grammar, terminals
        self._numbers = {name: nth for nth, name in enumerate(grammar.rules)}
        self._of_rules, self._of_terminals = list[str](), list[str]()
        for number, node in enumerate(grammar.nodes):
            self._of_terminals.append(self._written(node, self._of_terminals, "T"))
            is_terminal = number in terminals
            self._of_rules.append(f"E{number}" if is_terminal else self._written(node, self._of_rules, "r"))
        self.text = "\n".join(["%llguidance {}", *(f"{name}: {body}" for name, body in self._lines().items())])

    def _lines(self) -> dict[str, str]:
        """All rules and terminals to which the start refers, by name."""
        root = self._grammar.rules[ROOT]
        lines, waiting, seen = {"start": self._of_rules[root]}, [(root, False)], set[tuple[int, bool]]()
        while waiting:
            number, is_within = waiting.pop()  # is_within: within a terminal
            if (number, is_within) in seen:
                continue
            seen.add((number, is_within))
            node = self._grammar.nodes[number]
            if number in self._terminals and not is_within:
                lines[f"E{number}"] = self._of_terminals[number]
                waiting.append((number, True))
                continue
            if node.kind == "name":
                name, body = f"{'T' if is_within else 'r'}{self._numbers[node.value]}", self._grammar.rules[node.value]
                lines[name] = (self._of_terminals if is_within else self._of_rules)[body]
            waiting.extend((part, is_within) for part in self._grammar.below(number))
        return lines

    def _written(self, node: Node, written: Sequence[str], kind: str) -> str:
        match node.kind:
            case "text":
                return json.dumps(node.value) if kind == "T" else f"({' '.join(written[part] for part in node.parts)})"
            case "set":
                return f"/{_set_text(node.value, _in_expression)}/"
            case "name":
                return f"{kind}{self._numbers[node.value]}"
        return _compound(node, written)


# --- terminals --------------------------------------------------------------------------------------------------------


def _terminals(grammar: Grammar) -> set[int]:
    """The expressions that are terminals where they stand in rules.

    First as Lark's grammars have them: texts, sets, and rules that are not recursive. If those collide, expressions as
    large as can be: of a grammar without recursion the whole, which collides with nothing.
    """
    search = _Search(grammar)
    with contextlib.suppress(_TooLargeError):
        if not search.find():
            return search.terminals
    if search.is_finite[grammar.rules[ROOT]]:
        return {grammar.rules[ROOT]}
    search.join()
    with contextlib.suppress(_TooLargeError):
        while search.find():
            search.divide()
        return search.terminals
    return {number for number, node in enumerate(grammar.nodes) if node.kind == "set"}


class _TooLargeError(Exception):
    """The search for collisions takes too long."""


class _Automaton(NamedTuple):
    """The positions of an expression's characters, of which each word takes some in turn (V. M. Glushkov, The abstract
    theory of automata, 1961). Sets of positions, and of characters, are the bits of a number."""

    takes: list[int]  # by position: the characters, as classes of _Search
    follow: list[int]  # by position: positions
    first: int
    last: int

    def then(self, other: _Automaton, *, may_skip: bool, may_skip_other: bool) -> _Automaton:
        """The words of both in turn."""
        size = len(self.takes)
        first, last = other.first << size, other.last << size
        follow = [each | (first if self.last >> at & 1 else 0) for at, each in enumerate(self.follow)]
        return _Automaton(
            self.takes + other.takes,
            follow + [each << size for each in other.follow],
            self.first | (first if may_skip else 0),
            last | (self.last if may_skip_other else 0),
        )

    def beside(self, other: _Automaton) -> _Automaton:
        """The words of either."""
        size = len(self.takes)
        return _Automaton(
            self.takes + other.takes,
            self.follow + [each << size for each in other.follow],
            self.first | other.first << size,
            self.last | other.last << size,
        )

    def again(self) -> _Automaton:
        """Any number of words in turn."""
        follow = [each | (self.first if self.last >> at & 1 else 0) for at, each in enumerate(self.follow)]
        return self._replace(follow=follow)


_NOTHING = _Automaton([], [], 0, 0)


class _Search:
    """Finds the terminals that collide: after a word of one comes a character with which the same or another terminal
    goes on, and with which what may follow the word begins."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._work = grammar, 0
        ranges = [(first, last + 1) for node in grammar.nodes if node.kind == "set" for first, last in node.value]
        self._edges = sorted({edge for each in ranges for edge in each})
        self._edges_per_class = len(self._edges) // MOST_CLASSES + 1
        self.is_finite = grammar.least(False, lambda _, parts: all(parts))  # refers not to itself
        self._is_nullable = grammar.least(False, _is_nullable)
        self._first = grammar.least(0, self._first_of)
        self._follow = dict[int, int]()
        self._automata = dict[int, _Automaton | None]()
        self._ways_on = dict[tuple[int, int], int]()
        self._colliding = set[int]()
        self._divided = {n for n, node in enumerate(grammar.nodes) if node.kind not in ("set", "text", "name")}

    @property
    def terminals(self) -> set[int]:
        """After `find`: the chosen terminals."""
        return {number for number in self._follow if self._is_terminal(number)}

    def join(self) -> None:
        """Makes the terminals as large as they can be."""
        self._divided = set()

    def divide(self) -> None:
        """Takes the terminals apart that `find` found."""
        self._divided |= self._colliding

    def find(self) -> bool:
        """Whether terminals collide, for `divide`. Raises _TooLargeError."""
        self._find_follow()
        chosen, self._colliding = sorted(self.terminals), set()
        for other in chosen:
            if self._grammar.nodes[other].kind == "set":  # goes on after no word
                continue
            for one in chosen:
                if self._first[one] & self._first[other] and self._way_on(one, other) & self._follow[one]:
                    self._colliding.add(other)
                    break
            self._count(len(chosen) // 10)
        return bool(self._colliding)

    def _count(self, steps: int) -> None:
        self._work += steps
        if self._work > MOST_WORK:
            raise _TooLargeError

    def _is_terminal(self, number: int) -> bool:
        # What takes only the empty text is none.
        return self.is_finite[number] and number not in self._divided and self._first[number] != 0

    def _classes(self, ranges: Ranges) -> int:
        """The characters of a set as bits, each for those between edges of the grammar's sets."""
        bits = 0
        for first, last in ranges:
            lowest = bisect.bisect_left(self._edges, first) // self._edges_per_class
            highest = (bisect.bisect_left(self._edges, last + 1) - 1) // self._edges_per_class
            bits |= (2 << highest) - (1 << lowest)
        return bits

    def _first_of(self, node: Node, parts: list[int]) -> int:
        if node.kind == "set":
            return self._classes(node.value)
        found = 0
        for part, first in zip(node.parts, parts, strict=False):
            found |= first
            if node.kind in ("sequence", "text") and not self._is_nullable[part]:
                break
        return found if node.parts else sum(parts)

    def _find_follow(self) -> None:
        """Sets the characters with which that may begin which follows on an expression, in any place of it."""
        root = self._grammar.rules[ROOT]
        self._follow = {root: 0}
        waiting = [root]

        def add(number: int, characters: int) -> None:
            before = self._follow.get(number)
            self._follow[number] = (before or 0) | characters
            if self._follow[number] != before:
                waiting.append(number)

        while waiting:
            number = waiting.pop()
            if self._is_terminal(number):
                continue
            node, follow = self._grammar.nodes[number], self._follow[number]
            parts = self._grammar.below(number)
            self._count(1 + len(parts))
            for part in reversed(parts):
                may_repeat = node.kind == "repeat" and node.value not in ((0, 1), (1, 1))
                add(part, follow | (self._first[part] if may_repeat else 0))
                if node.kind in ("sequence", "text"):
                    follow = self._first[part] | (follow if self._is_nullable[part] else 0)

    def _way_on(self, one: int, other: int) -> int:
        """The characters that may come in a word of `other` after the beginning that is a word of `one`."""
        if (one, other) not in self._ways_on:
            self._ways_on[one, other] = self._found_way_on(one, other)
        return self._ways_on[one, other]

    def _found_way_on(self, one: int, other: int) -> int:
        left, right = self._automaton(one), self._automaton(other)
        if left is None or right is None:
            return -1  # unknown, perhaps all
        found, ended, seen = 0, 0, set[tuple[int, int]]()  # ended: positions at which a word of `one` may end
        waiting = [(left.first, right.first)]
        while waiting:
            ps, qs = waiting.pop()
            for p in _bits(ps):
                for q in _bits(qs):
                    self._count(1)
                    if (p, q) in seen or not left.takes[p] & right.takes[q]:
                        continue
                    seen.add((p, q))
                    if left.last >> p & 1 and not ended >> q & 1:
                        ended |= 1 << q
                        for following in _bits(right.follow[q]):
                            found |= right.takes[following]
                    waiting.append((left.follow[p], right.follow[q]))
        return found

    def _automaton(self, number: int) -> _Automaton | None:
        """None if it is too large."""
        waiting = [number]
        while waiting:
            lacking = [part for part in self._grammar.below(waiting[-1]) if part not in self._automata]
            if not lacking:
                done = waiting.pop()
                self._automata[done] = self._made(done)
            waiting.extend(lacking)
        return self._automata[number]

    def _made(self, number: int) -> _Automaton | None:
        node, parts = self._grammar.nodes[number], self._grammar.below(number)
        made = [automaton for part in parts if (automaton := self._automata[part]) is not None]
        size = sum(len(each.takes) for each in made)
        self._count(size // 10 + 1)
        if len(made) < len(parts) or size > MOST_POSITIONS:
            return None
        match node.kind:
            case "set":
                return _Automaton([self._first[number]], [0], 1, 1)
            case "name":
                return made[0]
            case "repeat":
                return self._repeated(made[0], *node.value, is_nullable=self._is_nullable[parts[0]])
            case "alternatives":
                return functools.reduce(_Automaton.beside, made, _NOTHING)
        found, may_skip = _NOTHING, True
        for part, automaton in zip(parts, made, strict=True):
            found = found.then(automaton, may_skip=may_skip, may_skip_other=self._is_nullable[part])
            may_skip = may_skip and self._is_nullable[part]
        return found

    def _repeated(self, one: _Automaton, least: int, most: int | None, *, is_nullable: bool) -> _Automaton:
        times = least if most is None else most
        if times * len(one.takes) > MOST_WRITTEN_OUT or times == 0:
            return one.again()
        size, follow, last = len(one.takes), list[int](), 0
        for nth in range(times):
            is_end, at = nth == times - 1, nth * size
            following = 0 if is_end and most is not None else one.first << (at if is_end else at + size)
            follow += [
                each << at | (following if one.last >> position & 1 else 0) for position, each in enumerate(one.follow)
            ]
            if is_nullable or nth + 1 >= least:
                last |= one.last << at
        return _Automaton(one.takes * times, follow, one.first, last)


def _is_nullable(node: Node, parts: list[bool]) -> bool:
    match node.kind:
        case "set":
            return False
        case "alternatives":
            return any(parts)
        case "repeat":
            return node.value[0] == 0 or parts[0]
    return all(parts)


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
