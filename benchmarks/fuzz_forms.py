"""Random hostile forms of answers: none that the trial process accepts may end, stop or fill the engine.

    python benchmarks/fuzz_forms.py [--minutes 10] [--seed 0] [--tokenizer FILE] [--results FILE]

Schemas, expressions, grammars in both notations, choices and structural tags are drawn at random, nested deeply,
repeated, joined in rings, and given extreme numbers and odd text. Each goes the engine's own way: tried in the killable
process, compiled in the one that follows all grammars, and followed there by random tokens for longer than the trial
did, with the mask, the forced tokens and a copy of the matcher at each; with both libraries in turn.

The exit status is 1 if the process that follows ended, if one call took it longer than the limit, or if a form left
more memory behind than the limit. The JSON tells how much processor time compiling took it, and how much memory forms
took.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from report import write_report

from headrace.core.options.structured_outputs import StructuredOutputs
from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.backends import Backends
from headrace.core.structured_output.follower import FollowedMatcher
from headrace.ipc.failure import HeadraceError
from headrace.ipc.messages import StructuredOutput

RESULTS = Path(__file__).parent / "results" / "fuzz_forms.json"
LIBRARIES = ("llguidance", "xgrammar")
WALKS, MOST_TOKENS = 3, 120
LONGEST_CALL_S = 10.0
"""Of processor time: a request ends after MOST_STEP_S, but the steps wait for the call that took so long."""
MOST_LEFT_BYTES = 512 << 20
"""What a trial may take."""
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 7, 40, 1000, 65535, 10**6, 2**31, 2**53, -(2**63), 2**63, 2**64, 10**400)
NUMBERS += (0.5, 1e-7, 1e-300, 1e300, -0.0, 3.141592653589793)
TEXTS = (
    "",
    "a",
    "ab",
    " ",
    "\n",
    "\0",
    "é",
    "\u2028",
    "😀",
    "\ud7ff",
    '"',
    "\\",
    "</s>",
    "a" * 500,
    "%json",
    "x" * 5000,
)
FORMATS = ("date-time", "email", "ipv6", "uuid", "uri", "hostname", "duration", "unknown")
CLASSES = (
    "a",
    "b",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\S",
    r"[^a]",
    r"[a-z]",
    r"[\w\-]",
    r"\u00e9",
    "é",
    r"\p{L}",
    "$",
    "^",
    r"\b",
)


class Writer:
    """Writes random forms."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def form(self) -> tuple[str, str]:
        """A form's kind and text."""
        kind = self._chance.choice(("json", "json", "json", "regex", "regex", "grammar", "grammar", "tag", "choice"))
        match kind:
            case "json":
                return "json", self._text_of(self._mutated(self._root()))
            case "regex":
                return "regex", self._expression(self._chance.randint(1, 5))
            case "grammar":
                return "grammar", self._grammar()
            case "choice":
                return "choice", json.dumps([self._word() for _ in range(self._chance.choice((1, 3, 400)))])
        return "structural_tag", self._text_of(self._tag())

    @staticmethod
    def _text_of(value: Any) -> str:
        try:
            return json.dumps(value)
        except (RecursionError, ValueError):
            return "{}"

    def _word(self) -> str:
        return "".join(self._chance.choice(TEXTS) for _ in range(self._chance.randint(1, 3)))

    def _number(self) -> Any:
        number = self._chance.choice(NUMBERS)
        return number + self._chance.randint(-2, 2) if isinstance(number, int) else number

    # --- schemas

    def _root(self) -> Any:
        schema = self._schema(self._chance.randint(1, 4))
        roll = self._chance.random()
        if roll < 0.15:
            return self._chain(schema)
        if roll < 0.25:
            return self._nested(schema)
        if isinstance(schema, dict) and roll < 0.5:
            schema["$defs"] = {name: self._schema(2) for name in "abc"}
        return schema

    def _chain(self, end: Any) -> Any:
        """Definitions that refer to each other, in a ring at times."""
        count = self._chance.choice((2, 20, 200, 1500))
        last = end if self._chance.random() < 0.6 else {"$ref": "#/$defs/d0"}
        wrap = self._chance.choice(
            (
                lambda inner: inner,
                lambda inner: {"anyOf": [inner, {"type": "null"}]},
                lambda inner: {"type": "array", "items": inner},
                lambda inner: {"type": "object", "properties": {"a": inner, "b": inner}},
            )
        )
        links = {f"d{n}": wrap({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": last}}

    def _nested(self, schema: Any) -> Any:
        wrap = self._chance.choice(
            (
                lambda inner: {"type": "array", "items": inner},
                lambda inner: {"anyOf": [inner, inner]},
                lambda inner: {"allOf": [inner]},
                lambda inner: {"oneOf": [inner, {"type": "null"}]},
                lambda inner: {"properties": {"a": inner}, "required": ["a"]},
                lambda inner: {"additionalProperties": inner},
                lambda inner: {"not": inner},
            )
        )
        for _ in range(self._chance.choice((3, 8, 12, 60, 400))):
            schema = wrap(schema)
            if len(str(schema)) > 100_000:
                break
        return schema

    def _schema(self, depth: int) -> Any:
        chance = self._chance
        if chance.random() < 0.05:
            return chance.choice((True, False, {}))
        inner = (lambda: self._schema(depth - 1)) if depth else (lambda: {"type": "integer"})
        keywords: dict[str, Any] = {
            "type": chance.choice(("object", "array", "string", "integer", "number", ["string", "null"], "boolean")),
            "properties": {self._word(): inner() for _ in range(chance.randint(0, 4))},
            "patternProperties": {self._expression(1): inner()},
            "additionalProperties": chance.choice((True, False, inner())),
            "required": [self._word()],
            "items": inner(),
            "prefixItems": [inner(), inner()],
            "anyOf": [inner(), inner()],
            "oneOf": [inner(), inner()],
            "allOf": [inner(), inner()],
            "not": inner(),
            "if": inner(),
            "then": inner(),
            "enum": [self._number(), self._word(), None, [self._word()], {"a": self._number()}],
            "const": chance.choice((self._number(), self._word(), {"a": [self._number()]})),
            "pattern": self._expression(2),
            "format": chance.choice(FORMATS),
            "$ref": chance.choice(("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/nowhere")),
            "propertyNames": {"pattern": self._expression(1)},
            "x-guidance": {"whitespace_pattern": self._expression(1)},
        }
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            keywords[name] = self._number()
        for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            keywords[name] = self._number()
        named = chance.sample(sorted(keywords), chance.randint(1, 5))
        return {name: keywords[name] for name in {"type", *named}}

    def _mutated(self, schema: Any) -> Any:
        """Replaces some parts by other ones."""
        chance = self._chance
        if chance.random() < 0.03:
            return chance.choice((None, self._number(), self._word(), [], schema))
        if isinstance(schema, dict) and len(schema) < 100:
            return {name: self._mutated(each) for name, each in schema.items()}
        if isinstance(schema, list) and len(schema) < 100:
            return [self._mutated(each) for each in schema]
        return schema

    def _tag(self) -> Any:
        chance = self._chance
        tags = [
            {
                "begin": f"<{self._word()}>",
                "content": {"type": "json_schema", "json_schema": self._root()},
                "end": "</a>",
            }
            for _ in range(chance.randint(1, 3))
        ]
        if chance.random() < 0.3:
            old = [{"begin": "<a>", "schema": self._root(), "end": "</a>"}]
            return {"type": "structural_tag", "structures": old, "triggers": ["<"]}
        form: Any = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": chance.random() < 0.5}
        for _ in range(chance.choice((0, 0, 1, 30))):
            form = {
                "type": chance.choice(("sequence", "or")),
                "elements": [form, {"type": "const_string", "value": "x"}],
            }
        return {"type": "structural_tag", "format": form}

    # --- expressions

    def _expression(self, depth: int) -> str:
        chance = self._chance
        if not depth:
            return re.escape(self._word()) if chance.random() < 0.2 else chance.choice(CLASSES)
        inner = self._expression(depth - 1)
        low = chance.choice((0, 1, 2, 30, 500, 10_000))
        return chance.choice(
            (
                f"({inner})*",
                f"({inner})+?",
                f"({inner}){{{low}}}",
                f"({inner}){{{low},{low + chance.choice((0, 3, 1000))}}}",
                f"({inner}){{{low},}}",
                f"{inner}|{self._expression(depth - 1)}",
                f"{inner}{self._expression(depth - 1)}",
                f"({inner}|{inner}{inner})*",
                f"(?:{inner})?" * chance.choice((1, 20, 300)),
                "(" * (nested := chance.choice((1, 50, 1000))) + inner + ")" * nested,
                f"(?={inner}){inner}",
                f"(?i:{inner})",
                f"[{inner}]",
            )
        )

    # --- grammars

    def _late(self) -> str:
        """An ambiguous grammar behind more text than the trial follows."""
        chance = self._chance
        char = chance.choice(("[^x]", "[a-z ]", '"a"'))
        rules = [f"r{n} ::= {char} | r{n} r{(n + 1) % 5} | r{(n + 2) % 5} {char}?" for n in range(5)]
        more = [f"s{n} ::= r{n % 5} s{(n + 1) % 40} | s{(n + 7) % 40} {char} | {char}" for n in range(40)]
        begin = json.dumps("go on " * chance.choice((20, 100)))
        return "\n".join([f"root ::= {begin} ({chance.choice(('r0 ', 's0 ', 'r0 s0 '))})+", *rules, *more])

    def _grammar(self) -> str:
        chance = self._chance
        if chance.random() < 0.1:
            return self._late()
        is_gbnf = chance.random() < 0.5
        names = ["root" if is_gbnf else "start", *(f"r{n}" for n in range(chance.choice((0, 2, 5, 300))))]
        sign = " ::= " if is_gbnf else ": "
        rules = [f"{name}{sign}{self._alternatives(names, is_gbnf)}" for name in names]
        if not is_gbnf and chance.random() < 0.3:
            rules.append(f"r{len(names)}: %json {self._text_of(self._root())}")
            rules[0] += f" | r{len(names)}"
        return "\n".join(rules)

    def _alternatives(self, names: list[str], is_gbnf: bool) -> str:
        return " | ".join(self._sequence(names, is_gbnf) for _ in range(self._chance.randint(1, 4)))

    def _sequence(self, names: list[str], is_gbnf: bool) -> str:
        return " ".join(self._item(names, is_gbnf) for _ in range(self._chance.randint(1, 4)))

    def _item(self, names: list[str], is_gbnf: bool) -> str:
        chance = self._chance
        bounds = f"{{{chance.choice((0, 2, 50, 5000))},{chance.choice((3, 60, 6000))}}}"
        item = chance.choice(
            (
                chance.choice(names),
                chance.choice(names),
                json.dumps(chance.choice(("a", "b", "ab", "\n", "é", "a" * 300))),
                '""',
                "[a-z]" if is_gbnf else "/[a-z]/",
                "[^a]" if is_gbnf else "/[^a]+/",
                f"({chance.choice(names)} | {chance.choice(names)})",
                "<[3]>",
            )
        )
        return item + chance.choice(("", "", "", "*", "+", "?", bounds))


# --- in the engine's place --------------------------------------------------------------------------------------------


class Engine:
    """Does with a form what an engine does."""

    def __init__(self, tokenizer: bytes, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._backends = Backends(StructuredOutputs(), Vocabulary(tokenizer, vocab_size, (2,)))

    def stop(self) -> None:
        self._backends.stop()

    def follow(self, library: str, kind: Any, text: str, seed: int) -> dict[str, Any]:
        wanted = StructuredOutput(kind=kind, text=text, backend=library, disable_fallback=True)
        done = {"outcome": "accepted", "compile_s": 0.0, "call_s": 0.0, "tokens": 0, "bytes": 0}
        try:
            held = self._backends._memory.hold(self._backends._trial.check(library, wanted))
        except HeadraceError as error:
            return {**done, "outcome": _outcome(str(error))}
        follower, began_s = self._backends._follower, self._used_s()
        life, held_before = follower.life, self._private_bytes()
        try:
            start = follower.compile(library, wanted, held)
        except HeadraceError as error:
            return {**done, "outcome": f"differs: {error}"}
        if began_s is not None and follower.life == life:
            done["compile_s"] = (self._used_s() or 0.0) - began_s
        for nth in range(WALKS):
            self._walk(start.copy(), random.Random(seed + nth), done)
        if held_before is None:  # the process has begun with this form
            return done
        if follower.life != life:
            return {**done, "outcome": f"DIED: {start.problem}"}
        done["bytes"] = (self._private_bytes() or 0) - held_before
        return done

    def _walk(self, matcher: FollowedMatcher, chance: random.Random, done: dict[str, Any]) -> None:
        mask = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        for _ in range(MOST_TOKENS):
            began_s = self._used_s() or 0.0
            self._backends.begin([(matcher, 0, [])])(mask)
            matcher.num_valid(matcher.forced_tokens()[:4])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.is_complete or matcher.problem or not len(allowed):
                return
            is_taken = matcher.accept(int(chance.choice(allowed)))
            done["call_s"] = max(done["call_s"], (self._used_s() or 0.0) - began_s)
            done["tokens"] += 1
            if not is_taken:
                return
            if chance.random() < 0.05:
                matcher = matcher.copy()

    def _used_s(self) -> float | None:
        """Processor time of the process that follows; None if it does not run."""
        return None if (process := self._process()) is None else sum(process.cpu_times()[:2])

    def _private_bytes(self) -> int | None:
        return (
            None if (process := self._process()) is None else process.memory_info().rss - process.memory_info().shared
        )

    def _process(self) -> psutil.Process | None:
        pid = self._backends._follower._pid
        return psutil.Process(pid) if pid else None


def _outcome(problem: str) -> str:
    for word in ("ended with status", "takes more than", "not compiled within", "killed"):
        if word in problem:
            return word
    return "refused"


def fuzz(minutes: float, seed: int, tokenizer: bytes, vocab_size: int) -> dict[str, Any]:
    engine = Engine(tokenizer, vocab_size)
    outcomes = {library: collections.Counter[str]() for library in LIBRARIES}
    largest = {library: {"compile_s": 0.0, "call_s": 0.0, "bytes": 0} for library in LIBRARIES}
    problems: list[str] = []
    num_tokens, number, end_s = 0, 0, time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        number += 1
        kind, text = Writer(random.Random(f"{seed} {number}")).form()
        for library in LIBRARIES:
            done = engine.follow(library, kind, text, number)
            outcome = done["outcome"]
            outcomes[library][outcome.partition(":")[0]] += 1
            num_tokens += done["tokens"]
            for what, most in largest[library].items():
                largest[library][what] = max(most, done[what])
            where = f"{library}, form {number} of seed {seed}: {kind} {text[:300]}"
            if outcome.startswith(("DIED", "differs")):
                problems.append(f"{outcome} for {where}")
            if done["call_s"] > LONGEST_CALL_S:
                problems.append(f"one call took {done['call_s']:.2f} s for {where}")
            if done["bytes"] > MOST_LEFT_BYTES:
                problems.append(f"{done['bytes'] >> 20} MiB for {where}")
    engine.stop()
    return {
        "forms": number,
        "tokens": num_tokens,
        "outcomes": {library: dict(sorted(each.items())) for library, each in outcomes.items()},
        "largest": largest,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a real model; default: that of the tests")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.tokenizer is not None:
        text = asked.tokenizer.read_text()
    else:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
        import tiny_models

        text = tiny_models.make_tokenizer().backend_tokenizer.to_str()
    from tokenizers import Tokenizer

    vocab_size = max(Tokenizer.from_str(text).get_vocab().values()) + 1
    found = fuzz(asked.minutes, asked.seed, text.encode(), vocab_size)
    write_report(asked.results, "fuzz_forms", found, seed=asked.seed)
    print(json.dumps({**found, "problems": found["problems"][:20]}, indent=1))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
