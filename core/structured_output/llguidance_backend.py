"""The llguidance backend: an Earley parser over lexemes, in Rust, that builds no automaton before the first token."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from headrace.core.structured_output.backend import MOST_FORCED, MOST_STEP_S, Backend, Guarded, still_forced
from headrace.core.structured_output.forms import is_gbnf, prepared
from headrace.core.structured_output.gbnf_in_lark import lark_of_gbnf
from headrace.core.structured_output.json_schema import (
    MOST_TRIES,
    find_culprit,
    schemas_in_lark,
    with_schemas_in_lark,
)
from headrace.core.structured_output.open_names import with_exact_names
from headrace.core.structured_output.refusals import reason, refusal
from headrace.core.structured_output.structural_tag import format_of, in_lark
from headrace.core.structured_output.token_bytes import TokenBytes
from headrace.core.structured_output.unquoted_texts import for_llguidance, with_texts
from headrace.ipc.failure import InvalidRequestError, let_interrupts_pass
from headrace.ipc.messages import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS: dict[str, Any] = {
    "max_items_in_row": 25_000,  # an object of 5,000 optional properties has some 20,000
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Limits of one grammar: tens of milliseconds to compile, a few milliseconds per mask, and some 100 MB."""


MASKS_ON_ONE_THREAD = 8
"""So many masks are made before the library's threads wake up; those would also compete with the step's threads."""
STRING_LENGTHS = (2, 4, 6, 8, 10, 14, 20, 30)
"""For each length, the library precomputes the set of tokens that are text of up to this length, and allows it at once
where so much text may follow. Its default lengths are 10 and 30: near the end of a text of bounded length it would
check every token."""


class LLGuidanceMatcher(Guarded):
    """A `Matcher`."""

    def __init__(
        self, backend: Backend, matcher: LLMatcher, mask: np.ndarray | None = None, forced: list[int] | None = None
    ) -> None:
        self.backend: Backend = backend
        self.matcher = matcher
        self.mask = mask  # [num_words] int32 of this state, if known: at the start, where all copies share it
        self._forced = forced  # forced tokens of this state, once computed

    def accept(self, token_id: int) -> bool:
        if self.stopped:
            return False
        self.mask, self._forced = None, still_forced(self._forced, token_id)
        with self.step():
            return bool(self.matcher.consume_token(token_id)) and not self.matcher.is_error()
        return False

    @property
    def is_complete(self) -> bool:
        # Where nothing may follow on an unfinished text, the library stops as well, and lets the end token through.
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def problem(self) -> str:
        return self.stopped or reason(self.matcher.get_error())

    def num_valid(self, token_ids: Sequence[int]) -> int:
        with self.step():
            return int(self.matcher.validate_tokens(list(token_ids)))
        return 0

    def forced_tokens(self) -> list[int]:
        if self._forced is None:
            self._forced = []
            with self.step():
                self._forced = list(self.matcher.compute_ff_tokens()[:MOST_FORCED])
        return self._forced

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.backend, self.matcher.deep_copy(), self.mask, self._forced)

    def fill(self, index: int, drafts: Sequence[int], masks: np.ndarray) -> None:
        """Writes the masks of this state and of those after each draft token, from masks[index] on."""
        with self.step():
            matcher = self.matcher.deep_copy() if drafts else self.matcher
            for nth in range(len(drafts) + 1):
                if nth:
                    matcher.consume_token(drafts[nth - 1])
                matcher.unsafe_compute_mask_ptr(masks.ctypes.data + (index + nth) * masks.strides[0], masks.strides[0])
        if self.stopped:
            masks[index : index + len(drafts) + 1] = -1  # the next token ends the request


class LLGuidanceBackend:
    """A `Backend`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes about a second for a large vocabulary. Raises ValueError if the library cannot read the tokenizer."""
        tokens = TokenBytes(tokenizer_json, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(cast(Any, tokens), eos_token=list(eos_token_ids) or None, slices=_slices())
        self._limits = LLParserLimits(**LIMITS)
        self._is_slow = False
        """Masks that were made in parallel took long: the next ones are made one by one, to find the slow matcher."""

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        """Created lazily by the thread that fills masks: its threads inherit that thread's priority, and not the lower
        one of compiler threads."""
        return LLExecutor(num_threads=os.cpu_count() or 1)

    def compile(self, wanted: StructuredOutput) -> LLGuidanceMatcher:
        try:
            wanted = prepared(wanted)
            grammar = _grammar_of(wanted)
        except (ValueError, AssertionError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise refusal(wanted, str(error) or type(error).__name__) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if problem := matcher.get_error():
            raise self._refusal(wanted, problem)
        # The first mask builds most of what later masks reuse, and may reach a limit; copies share it.
        masks = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), np.int32)
        matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        forced = list(matcher.compute_ff_tokens()[:MOST_FORCED])
        if problem := matcher.get_error():
            raise refusal(wanted, problem)
        return LLGuidanceMatcher(self, matcher, masks[0], forced)

    def _refusal(self, wanted: StructuredOutput, problem: str) -> InvalidRequestError:
        """The error, naming the part of the schema that has the problem, and in a grammar which schema it is."""

        def problem_of(schema: Any) -> str:
            return _problem_of(schema, self._limits)

        if wanted.kind == "json":
            return refusal(wanted, problem, find_culprit(json.loads(wanted.text), problem, problem_of))
        if wanted.kind == "grammar":
            with contextlib.suppress(ValueError):  # a schema is not JSON, which is then the problem
                for schema in schemas_in_lark(wanted.text)[:MOST_TRIES]:
                    if (own := problem_of(schema)) and own in problem:
                        title = schema.get("title") if isinstance(schema, dict) else None
                        where = find_culprit(schema, own, problem_of)
                        return refusal(wanted, own, where, title if isinstance(title, str) else "")
        return refusal(wanted, problem)

    def forget(self) -> None:
        """Does nothing: compiled grammars leave nothing in caches."""

    def fill(self, positions: Sequence[tuple[Any, int, list[int]]], masks: np.ndarray) -> None:
        plain, drafted = list[tuple[LLGuidanceMatcher, int]](), list[tuple[LLMatcher, int, list[int]]]()
        for position, index, drafts in positions:
            if self._is_slow:
                position.fill(index, drafts, masks)
            elif drafts:
                drafted.append((position.matcher, index, drafts))
            elif position.mask is not None:
                masks[index] = position.mask
            else:
                plain.append((position, index))
        self._is_slow = self._is_slow and len(positions) == 1  # which may be another thread's, of a form that is tried
        if len(plain) <= MASKS_ON_ONE_THREAD:
            for position, index in plain:
                position.fill(index, (), masks)
            plain = []
        if plain or drafted:
            try:
                self._fill_in_parallel([(position.matcher, index) for position, index in plain], drafted, masks)
            except BaseException as error:
                let_interrupts_pass(error)
                for position, index, drafts in positions:  # alone, each fails by itself
                    position.fill(index, drafts, masks)

    def _fill_in_parallel(
        self, plain: list[tuple[LLMatcher, int]], drafted: list[tuple[LLMatcher, int, list[int]]], masks: np.ndarray
    ) -> None:
        began_s = time.monotonic()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        self._is_slow = time.monotonic() - began_s > MOST_STEP_S


BACKEND = LLGuidanceBackend


def version() -> str:
    return str(llguidance.__version__)


def _grammar_of(wanted: StructuredOutput) -> str:
    """A prepared form in the library's notation. Raises ValueError and others if the library cannot read it."""
    match wanted.kind:
        case "json":
            return _json_grammar(wanted.text, wanted)
        case "json_object":
            return _json_grammar('{"type": "object"}', wanted)
        case "regex":
            return LLMatcher.grammar_from_regex(_with_narrow_classes(wanted.text))
        case "choice":
            return LLMatcher.grammar_from_lark(
                # A terminal may have more alternatives than a rule.
                "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in json.loads(wanted.text))
            )
        case "grammar":
            return LLMatcher.grammar_from_lark(_in_lark(wanted.text, _json_options(wanted)))
        case "structural_tag":
            return _tag_grammar(json.loads(wanted.text), wanted)


def _in_lark(grammar: str, options: JsonCompileOptions) -> str:
    """options: of the schemas within it."""
    if is_gbnf(grammar):
        return lark_of_gbnf(grammar)
    grammar = with_texts(grammar, for_llguidance)
    return with_schemas_in_lark(grammar, lambda schema: _with_options(schema, options))


def _with_narrow_classes(pattern: str) -> str:
    r"""Replaces class escapes by sets that lie within those of Python's `re`; \d and \w are ASCII, as in JSON schemas.

    The library's classes are Unicode's: with them, small models write segmented digits for \d and marks for \w.
    """
    open_sets = list[bool]()  # whether each is negated

    def read(found: re.Match[str]) -> str:
        part = found[0]
        if part.startswith("["):
            open_sets.append(part.startswith("[^"))
        elif part == "]" and open_sets:
            open_sets.pop()
        return (_WIDE if sum(open_sets) % 2 else _NARROW).get(part, part)

    return re.sub(r"\\.|\[\^?\]?|\]", read, pattern, flags=re.DOTALL)


_NARROW = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\W": r"[^\w\p{N}]", r"\S": r"[^\s\x1c-\x1f]"}
_WIDE = {r"\w": r"[\w\p{N}]", r"\s": r"[\s\x1c-\x1f]", r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]"}
"""Replacements within a negated set."""
_ESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL)
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""Characters that must be escaped in an expression between slashes."""


def _json_options(wanted: StructuredOutput) -> JsonCompileOptions:
    options: JsonCompileOptions = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if wanted.whitespace_pattern:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return options


def _with_options(schema: Any, options: JsonCompileOptions) -> Any:
    """A schema within a grammar, with its options, or those that it states itself."""
    schema = with_exact_names(schema)
    return {"x-guidance": options, **(schema if isinstance(schema, dict) else {"allOf": [schema]})}


def _json_grammar(schema: str, wanted: StructuredOutput) -> str:
    exact = with_exact_names(json.loads(schema))
    if not isinstance(exact, dict):  # true and false are schemas too
        exact = {"allOf": [exact]}
    return LLMatcher.grammar_from_json_schema(json.dumps(exact), overrides=_json_options(wanted))


def _tag_grammar(tag: Any, wanted: StructuredOutput) -> str:
    options = _json_options(wanted)

    def schema_of(schema: Any) -> str:
        return f"%json {json.dumps(_with_options(schema, options))}"

    def regex_of(pattern: str) -> str:
        written = _ESCAPED.sub(lambda found: _IN_LARK.get(found[0], found[0]), _with_narrow_classes(pattern))
        return f"/{written}/"

    def lark_of(grammar: str) -> str:
        return _in_lark(grammar, options)

    return in_lark(format_of(tag), schema_of=schema_of, regex_of=regex_of, lark_of=lark_of)


def _problem_of(schema: Any, limits: LLParserLimits) -> str:
    """Why the schema cannot be compiled, or "". Needs no tokenizer."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(with_exact_names(schema)))
    return LLMatcher.validate_grammar(grammar, limits=limits)


def _slices() -> list[str]:
    """Expressions of the token sets ("slices") whose part of a mask the library precomputes, narrow ones first."""
    spaces, *_, texts = LLTokenizer.general_slices()
    assert texts.endswith("]+"), "the last ones are texts of any length"
    return [spaces, *(f"{texts[:-1]}{{1,{length}}}" for length in STRING_LENGTHS), texts]
