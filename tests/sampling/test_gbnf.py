"""GBNF, llama.cpp's notation of grammars: every library takes exactly the texts of a grammar, whatever its terminals
share. Judged by a matcher that tries every way."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from processor_time import least_processor_s
from test_grammar_backends import compiled, each_backend, may_end, takes, tokens_of
from thinned import every

from headrace import InvalidRequestError
from headrace.core.structured_output.gbnf import normalised
from headrace.core.structured_output.gbnf_in_lark import lark_of_gbnf

Expression = tuple[Any, ...]
LETTERS = "ab,"
MOST = 5
"""Characters of the texts that are tried."""
COUNTS = ((0, 99), (1, 99), (0, 1), (0, 0), (2, 2), (1, 3), (2, 99))
"""Least and most of a repetition; 99 for any number."""


class Chance:
    """The rules of a random small grammar."""

    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)
        self._names = ["root", "x-y", "x_y", "2nd", "xY"][: self._numbers.randint(1, 5)]
        self.rules = {name: self._alternatives(2) for name in self._names}

    def _alternatives(self, depth: int) -> Expression:
        count = self._numbers.choice((1, 1, 2, 3))
        return ("or", *(("then", *self._parts(depth)) for _ in range(count)))

    def _parts(self, depth: int) -> Iterator[Expression]:
        for _ in range(self._numbers.choice((0, 1, 1, 2, 2, 3))):
            part = self._part(depth)
            for _ in range(self._numbers.choice((0, 0, 0, 1, 1, 2))):
                part = ("times", part, *self._numbers.choice(COUNTS))
            yield part

    def _part(self, depth: int) -> Expression:
        match self._numbers.randrange(6 if depth else 4):
            case 0:
                return ("text", "".join(self._numbers.choices(LETTERS, k=self._numbers.choice((0, 1, 2, 3)))))
            case 1:
                return ("set", "".join(self._numbers.sample(LETTERS, self._numbers.randint(1, 3))), False)
            case 2:
                return ("set", "".join(self._numbers.sample(LETTERS, self._numbers.randint(0, 2))), True)
            case 3 | 4:
                return ("name", self._numbers.choice(self._names))
        return self._alternatives(depth - 1)


def written(rules: dict[str, Expression]) -> str:
    return "\n".join(f"{name} ::= {write(body)}" for name, body in rules.items())


def write(part: Expression) -> str:
    match part:
        case ("or", *parts):
            return f"({' | '.join(map(write, parts))})"
        case ("then", *parts):
            return " ".join(map(write, parts))
        case ("times", inner, least, most):
            return f"{write(inner)}{{{least},{'' if most == 99 else most}}}"
        case ("text", text):
            return f'"{text}"'
        case ("set", characters, is_negated):
            return f"[{'^' if is_negated else ''}{characters}]" if characters else "."
    return str(part[1])


def texts_of(rules: dict[str, Expression], most: int) -> set[str]:
    """All texts of the rule root up to a length: the least sets that satisfy all rules."""
    found = {name: frozenset[str]() for name in rules}

    def joined(left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
        return frozenset(a + b for a in left for b in right if len(a) + len(b) <= most)

    def of(part: Expression) -> frozenset[str]:
        match part:
            case ("or", *parts):
                return frozenset().union(*map(of, parts))
            case ("then", *parts):
                result = frozenset({""})
                for each in parts:
                    result = joined(result, of(each))
                return result
            case ("times", inner, least, count):
                one, result, power = of(inner), frozenset[str](), frozenset({""})
                for nth in range(min(count, most + least) + 1):
                    result |= power if nth >= least else frozenset()
                    power = joined(power, one)
                return result
            case ("text", text):
                return frozenset({text} if len(text) <= most else ())
            case ("set", characters, is_negated):
                return frozenset(each for each in LETTERS if (each in characters) != is_negated)
        return found[part[1]]

    while True:
        after = {name: of(body) for name, body in rules.items()}
        if after == found:
            return set(found["root"])
        found = after


def taken(name: str, start: Any) -> set[str]:
    """The texts of LETTERS, up to MOST of them, that are whole answers."""
    tokens = {each: tokens_of(each)[0] for each in LETTERS}
    found, waiting = set[str](), [("", start)]
    while waiting:
        text, matcher = waiting.pop()
        if may_end(matcher):
            found.add(text)
        for each in LETTERS if len(text) < MOST else "":
            following = matcher.copy()
            if not matcher.is_complete and following.accept(tokens[each]):
                waiting.append((text + each, following))
    return found


SEEDS = [("llguidance", range(start, start + 25)) for start in (0, 25, 50)] + [("xgrammar", range(100, 112))]


@pytest.mark.parametrize(("name", "seeds"), every(3, SEEDS))
def test_the_texts_of_a_grammar_are_taken_and_no_others(name: str, seeds: range) -> None:
    for seed in seeds:
        rules = Chance(seed).rules
        right, grammar = texts_of(rules, MOST), written(rules)
        if right:
            assert taken(name, compiled(name, "grammar", grammar)) == right, (seed, grammar)
        else:  # only longer texts, or none
            with contextlib.suppress(InvalidRequestError):
                assert not taken(name, compiled(name, "grammar", grammar)), (seed, grammar)


CASES = {
    "a terminal that takes what follows it": (
        'root ::= x "," y\nx ::= [a-z,]+\ny ::= [a-z]+',
        ["a,b", "a,,b", ",,b", "a,b,c"],
        ["a", "a,", ",b"],
    ),
    "the same within a rule that refers to itself": (
        'root ::= "(" root ")" | x "," x\nx ::= [0-9,]+',
        ["1,2", "(,,,)", "((1,2,3))"],
        ["12", "(,,)]", "1,"],
    ),
    "a text that begins like another": ('root ::= x*\nx ::= "ab" | "abc" root "c" | "c"', ["abc", "ababcc"], ["abca"]),
    "names with - and _": ('root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"', ["123"], ["113", "223"]),
    "names that begin with a digit": ('root ::= 1st 2-nd\n1st ::= "1"\n2-nd ::= "2"', ["12"], ["1"]),
    "any character": ('root ::= "a" . "b"', ["a\nb", "a\rb", "axb", "aéb"], ["ab", "axxb"]),
    "sets with signs of other notations": (r"root ::= [a&&b]{2} [~\-\^]* [^\]\\]", ["a&x", "ab~-^."], ["ac.", "ab]"]),
    "a set with - at its end": ("root ::= [a-c-] [-x]", ["--", "bx"], ["d-", "aa"]),
    "nothing, repeated": ('root ::= "a"{0} "b"{0,0} ("" | "c"){0} "d"', ["d"], ["ad", "cd", ""]),
    "a rule of several lines": ('root ::= # one\n  "a"\n  | x\n  | ("b"\n "c")\n\nx ::= "d"', ["a", "bc", "d"], ["b"]),
    "a part that no text ends": ('root ::= "a" | x\nx ::= "b" x', ["a"], ["b", "bb"]),
    "a rule that begins with itself": ('root ::= root "," [a-b] | [a-b]', ["a", "a,b,a"], [",a", "a,"]),
    "recursion that ends in nothing": ('root ::= x "\\n"\nx ::= ([ \\n] x)?', ["\n", " \n", "\n\n \n"], ["", " "]),
}


@each_backend
@pytest.mark.parametrize("case", CASES)
def test_a_grammar_is_read_as_llama_cpp_reads_it(name: str, case: str) -> None:
    grammar, right, wrong = CASES[case]
    start = compiled(name, "grammar", grammar)
    assert [text for text in right if not takes(start, text)] == []
    assert [text for text in wrong if takes(start, text)] == []


@each_backend
@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined a second time"),
        ('root ::= x\ny ::= "a"', "there is no rule x, to which another one refers"),
        ('start ::= "a"', "there is no rule root"),
        ('root ::= ("a"\nx ::= "b"', "has no \\) at its end"),
        ('root ::= "a\n"', "line 1: .* cannot be read"),
        ("root ::= []", r"the set \[\] is empty"),
        ("root ::= [z-a]", "end is before its beginning"),
        (r'root ::= "\q"', r"\\q is no escape"),
        ('root ::= "a"{3,2}', "at most less than at least"),
        ('root ::= "a" root', "each alternative leads back to itself"),
        ('root ::= * "a"', "repeats nothing"),
        ("root ::= " + "(" * 5000, "groups stand within more than 100 others"),
        ('root ::= "a" <[7]>', r"line 1: <\[7\]> refers to a token, .* write a token's text in quotes"),
        ("root ::= !<[7]>*", r"!<\[7\]> refers to a token"),
        ("root ::= <think> [a-z]* </think>", "<think> refers to a token"),
        ("root ::= !<|im_end|>", r"!<\|im_end\|> refers to a token"),
        ("root ::= < a", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(name: str, grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        compiled(name, "grammar", grammar)


def test_terminals_that_cannot_collide_are_not_taken_apart() -> None:
    """Each character that is a terminal of its own costs a step of the parser, for every token of a mask."""
    lines = lark_of_gbnf(JSON).splitlines()
    letters = [line for line in lines if r"[\x{75}]" in line]  # the u of \u0000
    assert len(letters) == 1
    assert letters[0].startswith("T"), "it is part of a terminal, the text with its marks"
    assert sum(line.startswith("E") for line in lines) == 12


JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


MOST_S = 3
"""What takes the square of its length takes many times as long."""

LARGE = {
    "a large set": "root ::= [" + "".join(map(chr, range(0x4E00, 0x9E00, 2))) + "]+ root | [a]",
    "many words": "root ::= " + " | ".join(f'"{n:x}"' for n in range(3000)) + ' | "(" root ")"',
    "rules that double": "root ::= r0 root | [c]\nr40 ::= [ab]*\n"
    + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)),
    "a chain of recursive rules": "root ::= r0\nr900 ::= [a]+\n"
    + "\n".join(f'r{n} ::= r{n + 1} r{n + 1} | "a" root' for n in range(900)),
    "large counts": 'root ::= "a"{2000}{2000} root | [ab]{0,2000}',
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_grammar_is_divided_in_bounded_time(case: str) -> None:
    assert least_processor_s(lambda: lark_of_gbnf(LARGE[case]), MOST_S) < MOST_S


LONG = {
    "signs of comments": "root ::= x " + "#" * 60 + '\nx ::= "a"',
    "spaces in a count": 'root ::= "a"{' + " " * 200_000 + "x",
    "one name": "root ::= " + "x" * 200_000,
    "names without a sign": "root ::= " + "x " * 100_000,
    "a text without an end": 'root ::= "' + "\\a" * 100_000,
    "a set without an end": "root ::= [" + "[\\]" * 60_000,
    "repetitions of repetitions": 'root ::= "a"' + "*" * 20_000,
    "rules in a chain": 'root ::= r0\nr20000 ::= "a"\n' + "\n".join(f"r{n} ::= r{n + 1}" for n in range(20_000)),
    "digits of a count": 'root ::= "a"{' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_text_is_read_in_time_that_grows_with_its_length(case: str) -> None:
    def read() -> None:
        with contextlib.suppress(ValueError):
            normalised(LONG[case])

    assert least_processor_s(read, MOST_S) < MOST_S
