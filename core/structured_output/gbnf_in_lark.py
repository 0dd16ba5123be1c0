"""GBNF in llguidance's notation.

llguidance divides a text into terminals, each as long as it can be, before it parses. That takes the same texts only if
no terminal could also end earlier, where something may follow that begins like its rest. So terminals are chosen that
do not collide so: where two do, the longer one is taken apart, in the end into single characters. Those never collide,
as no character is the beginning of another.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.core.structured_output.gbnf import ROOT, Grammar, Node, Ranges, compound, read, set_text

MOST_POSITIONS = 600
"""Characters of a terminal whose collisions are looked for, repetitions written out; a larger one is taken apart."""
MOST_WRITTEN_OUT = 64
"""Characters of a repetition that are written out for that; beyond, it counts as any number of them."""
MOST_CLASSES = 2000
"""Classes of characters that the search tells apart."""
MOST_WORK = 50_000
"""Steps of that search, of about a microsecond; a grammar that needs more is written in single characters."""


def lark_of_gbnf(text: str) -> str:
    """The grammar in llguidance's notation, which takes the same texts. Raises ValueError."""
    grammar = read(text)
    return _Lark(grammar, _terminals(grammar)).text


def _in_expression(code: int) -> str:
    return rf"\x{{{code:x}}}"


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
                return f"/{set_text(node.value, _in_expression)}/"
            case "name":
                return f"{kind}{self._numbers[node.value]}"
        return compound(node, written)


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
