"""The xgrammar backend: an Earley parser in C++ that computes each rule's masks before the first token.

The Python package xgrammar imports torch and transformers, but its C++ library does not need them. So the library is
loaded through apache-tvm-ffi, on which it is built, with only the package's module that lists the library's classes.
tvm_ffi itself imports torch if it is installed, so torch is marked as missing during the import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from headrace.core.structured_output.backend import MOST_FORCED, MOST_STEP_S, Backend, Guarded, still_forced
from headrace.core.structured_output.forms import is_gbnf, prepared
from headrace.core.structured_output.json_schema import with_schemas_in_lark
from headrace.core.structured_output.refusals import refusal
from headrace.core.structured_output.structural_tag import format_of, with_patterns, with_schemas
from headrace.core.structured_output.unquoted_texts import for_xgrammar, with_texts
from headrace.core.structured_output.xgrammar_schema import followed, followed_expression
from headrace.ipc.failure import InvalidRequestError, let_interrupts_pass
from headrace.ipc.messages import StructuredOutput

PACKAGE = "xgrammar"
KNOWN = re.compile(r"0\.2\.[5-8](\D.*)?")
"""Versions whose functions take what is given to them here. 0.2.9 takes more, and lets texts through that repeat
`([^a].){2,6}` no time."""
NUM_THREADS = os.cpu_count() or 1
"""Threads that fill masks."""
MASKS_ON_ONE_THREAD = 8
"""So many masks are filled before the library's threads wake up."""
COMPILER_THREADS = 1
"""Threads that compile one grammar: others may be compiled at the same time, while steps run."""
CACHE_BYTES = 64 << 20
"""Size of the cache of grammars and of their rules' masks: with it, a schema of 20 fields takes 0.3 s of CPU time
instead of 0.9 s, and another with the same kinds of fields 0.01 s."""
LONGEST_FORCED = 32
"""Longest token, in bytes, that is tried when forced text is divided into tokens."""
NOT_UTF_8 = re.compile(rb"\xed[\xa0-\xbf]|\xe0[\x80-\x9f]|\xf0[\x80-\x8f]")
"""First bytes of surrogates and overlong encodings, which the library accepts as characters."""
CONTROLS = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Characters that JSON never needs: all below the space but CR and LF."""
BEGINNINGS = (b"\xed", b"\xe0", b"\xf0")
"""The first of those bytes: a token may end with it."""


@contextlib.contextmanager
def _lent(modules: dict[str, Any]) -> Iterator[None]:
    """Adds modules to sys.modules for a while, unless they are loaded already. None marks a module as missing."""
    lent = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(lent)
    try:
        yield
    finally:
        for name in lent:
            sys.modules.pop(name, None)


def _library() -> Any:
    """The module with the library's classes. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    package = types.ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    with _lent({"torch": None, PACKAGE: package}):
        importlib.import_module(f"{PACKAGE}.load_binding")
        return importlib.import_module(f"{PACKAGE}.tvm_ffi_binding._ffi_api")


_xgrammar = _library()


class XGrammarMatcher(Guarded):
    """A `Matcher`."""

    def __init__(self, backend: XGrammarBackend, matcher: Any, *, is_json: bool, is_text: bool) -> None:
        """is_json: forbid control characters, which JSON does not allow but the library does in strings of bounded
        length. is_text: forbid special tokens, which the library takes for their texts and answers do not show."""
        self.backend: Backend = backend
        self.matcher, self._is_json, self._is_text = matcher, is_json, is_text
        self._vocabulary = backend.vocabulary
        self._last: int | None = None  # the token accepted last
        self._forced: list[int] | None = None  # forced tokens of this state, once computed

    def accept(self, token_id: int) -> bool:
        if self.stopped:
            return False
        self._forced = still_forced(self._forced, token_id)
        taken = False
        with self.step():
            taken = token_id not in self.forbidden.token_ids and bool(self.matcher.accept_token(token_id, False))
        self._last = token_id if taken else self._last
        return taken

    @property
    def forbidden(self) -> Forbidden:
        """Tokens that must not come next, although the library may allow them."""
        return self._vocabulary.forbidden(self._last, is_json=self._is_json, is_text=self._is_text)

    @property
    def is_complete(self) -> bool:
        if self.matcher.is_terminated():
            return True
        with self.step():
            return bool(self.matcher.is_completed()) and self._vocabulary.has_only_ends(self.matcher)
        return False

    @property
    def problem(self) -> str:
        return self.stopped

    def num_valid(self, token_ids: Sequence[int]) -> int:
        with self.tried() as tried:
            for token_id in token_ids:
                if not tried.take(token_id):
                    break
        return tried.count

    @contextlib.contextmanager
    def tried(self) -> Iterator[Tried]:
        """Lets the matcher accept tokens for a while, and rolls them back at the end."""
        tried, last = Tried(self), self._last
        yield tried
        self._forced, self._last = None, last
        if tried.count:
            self.matcher.rollback(tried.count)

    def forced_tokens(self) -> list[int]:
        if self._forced is None:
            self._forced = []
            with self.step():
                if not self.matcher.is_terminated():
                    self._forced = self._vocabulary.spell(_forced_text(self.matcher), is_text=self._is_text)
        return self._forced

    def copy(self) -> XGrammarMatcher:
        flags = {"is_json": self._is_json, "is_text": self._is_text}
        twin = XGrammarMatcher(self.backend, self.matcher.fork(), **flags)  # type: ignore[arg-type]
        twin._last = self._last
        return twin


class Tried:
    """Accepts tokens that `XGrammarMatcher.tried` rolls back later."""

    def __init__(self, matcher: XGrammarMatcher) -> None:
        self._matcher = matcher
        self.count = 0

    def take(self, token_id: int) -> bool:
        taken = self._matcher.accept(token_id)
        self.count += taken
        return taken


class Forbidden(NamedTuple):
    token_ids: frozenset[int]
    others: np.ndarray
    """[num_words] int32: mask of all other tokens."""


class TokenTexts:
    """The bytes of a vocabulary's tokens, and masks derived from them."""

    def __init__(self, info: Any, vocab_size: int, special_token_ids: frozenset[int]) -> None:
        """special_token_ids: of added tokens that have a text and are special."""
        special = {int(each) for each in info.special_token_ids()} | {int(each) for each in info.stop_token_ids()}
        texts = [bytes(each) for each in info.decoded_vocab()]
        self._token_ids = {
            text: token_id for token_id, text in reversed(list(enumerate(texts))) if text and token_id not in special
        }
        self.ends = np.zeros(-(-vocab_size // 32), np.int32)
        for token_id in map(int, info.stop_token_ids()):
            self.ends.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._special = special_token_ids
        self._beginnings = {n: text[-1:] for n, text in enumerate(texts) if text.endswith(BEGINNINGS)}
        controls = frozenset(token_id for token_id, text in enumerate(texts) if CONTROLS.search(text))
        self._forbidden = {}
        for after in (b"", *BEGINNINGS):
            no_text = frozenset(token_id for token_id, text in enumerate(texts) if NOT_UTF_8.search(after + text))
            for is_json, is_text in itertools.product((False, True), repeat=2):
                found = no_text | (controls if is_json else set()) | (special_token_ids if is_text else set())
                self._forbidden[is_json, is_text, after] = self._forbidding(found)

    def _forbidding(self, token_ids: frozenset[int]) -> Forbidden:
        others = np.full_like(self.ends, -1)
        for token_id in token_ids:
            others.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return Forbidden(token_ids, others)

    def forbidden(self, last: int | None, *, is_json: bool, is_text: bool) -> Forbidden:
        """Tokens that are not UTF-8, alone or after `last`; with is_json also those with control characters other than
        CR and LF, which JSON never needs; with is_text also special ones."""
        return self._forbidden[is_json, is_text, b"" if last is None else self._beginnings.get(last, b"")]

    def spell(self, data: bytes, *, is_text: bool) -> list[int]:
        """Divides a text into tokens, always taking the longest: nearly always the tokenizer's result. is_text: without
        special ones."""
        at, found = 0, list[int]()
        while at < len(data) and len(found) < MOST_FORCED:
            ends = range(min(len(data), at + LONGEST_FORCED), at, -1)
            end = next((end for end in ends if self._takes(data[at:end], is_text)), None)
            if end is None:
                break
            found.append(self._token_ids[data[at:end]])
            at = end
        return found

    def _takes(self, text: bytes, is_text: bool) -> bool:
        token_id = self._token_ids.get(text)
        return token_id is not None and not (is_text and token_id in self._special)

    def has_only_ends(self, matcher: Any) -> bool:
        """Whether only an end-of-sequence token may come next."""
        mask = np.empty((1, len(self.ends)), np.int32)
        matcher.fill_next_token_bitmask(mask, 0, False)
        return not np.any(mask[0] & ~self.ends)


class XGrammarBackend:
    """A `Backend`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError if the library cannot read the tokenizer, InvalidRequestError if its version is unknown."""
        if not KNOWN.fullmatch(version()):
            raise InvalidRequestError(
                f"xgrammar {version()} cannot be used, but 0.2.5 to 0.2.8: pip install 'xgrammar>=0.2.5,<0.2.9'"
            )
        kind = json.loads(str(_xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer_json)))
        tokenizer = json.loads(tokenizer_json)
        tokens = _tokens(tokenizer, vocab_size)
        info = _xgrammar.TokenizerInfo(
            tokens, kind["vocab_type"], vocab_size, list(eos_token_ids) or None, kind["add_prefix_space"]
        )
        added = (each["id"] for each in tokenizer.get("added_tokens", ()) if each.get("special"))
        special = {each for each in added if each < vocab_size} - set(eos_token_ids)
        self.vocabulary = TokenTexts(info, vocab_size, frozenset(special))
        self._is_slow = False
        """Masks that were made in parallel took long: the next ones are made one by one, to find the slow matcher."""
        self._compiler = _xgrammar.GrammarCompiler(info, COMPILER_THREADS, True, CACHE_BYTES)

    @functools.cached_property
    def _batch(self) -> Any:
        """Created lazily by the thread that fills masks: its threads inherit that thread's priority, and not the lower
        one of compiler threads."""
        return _xgrammar.BatchGrammarMatcher(NUM_THREADS)

    def compile(self, wanted: StructuredOutput) -> XGrammarMatcher:
        try:
            compiled = self._compiled(wanted)
        except (ValueError, AssertionError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise refusal(wanted, str(error) or type(error).__name__) from None
        except RuntimeError as error:  # raised by the library
            raise refusal(wanted, _without_place(str(error))) from None
        matcher = _xgrammar.GrammarMatcher(compiled, None, False, -1, None)
        is_json = wanted.kind in ("json", "json_object", "structural_tag") or _has_json(wanted)
        # Grammars of tool calls mean the special tokens whose texts they have.
        is_text = wanted.kind in ("json", "json_object", "regex", "choice")
        is_text |= wanted.kind == "grammar" and is_gbnf(wanted.text)
        return XGrammarMatcher(self, matcher, is_json=is_json, is_text=is_text)

    def forget(self) -> None:
        self._compiler.clear_cache()

    def fill(self, positions: Sequence[tuple[Any, int, list[int]]], masks: np.ndarray) -> None:
        plain = []
        for position, index, drafts in positions:
            if position.matcher.is_terminated():
                masks[index : index + len(drafts) + 1] = self.vocabulary.ends
            elif not drafts:
                plain.append((position, index))
        if self._is_slow or len(plain) <= MASKS_ON_ONE_THREAD or not self._fill_in_parallel(plain, masks):
            self._is_slow = self._is_slow and len(positions) == 1  # which may be another thread's, of one that is tried
            for position, index in plain:
                with position.step():
                    position.matcher.fill_next_token_bitmask(masks, index, False)
        for position, index, drafts in positions:
            if drafts and not position.matcher.is_terminated():
                _fill_drafted(position, index, drafts, masks)
            else:
                masks[index] &= position.forbidden.others
            if position.stopped:
                masks[index : index + len(drafts) + 1] = -1  # the next token ends the request

    def _fill_in_parallel(self, plain: list[tuple[XGrammarMatcher, int]], masks: np.ndarray) -> bool:
        """False if the library fails; alone, each mask fails by itself."""
        began_s = time.monotonic()
        matchers, indices = [position.matcher for position, _ in plain], [index for _, index in plain]
        try:
            self._batch.batch_fill_next_token_bitmask(matchers, masks, indices, False)
        except BaseException as error:
            let_interrupts_pass(error)
            return False
        self._is_slow = time.monotonic() - began_s > MOST_STEP_S
        return True

    def _compiled(self, wanted: StructuredOutput) -> Any:
        """Compiles a request's form. Raises ValueError and others if the library cannot read it."""
        wanted = prepared(wanted)
        has_own_whitespace = wanted.disable_any_whitespace or bool(wanted.whitespace_pattern)

        def followed_within(schema: Any) -> Any:
            """Of a tag or a grammar; those of tool calls state their own white space."""
            if has_own_whitespace and not (isinstance(schema, dict) and "x-guidance" in schema):
                raise ValueError("the white space of JSON within a tag or a grammar cannot be chosen")
            return followed(schema)

        match wanted.kind:
            case "json":
                return self._compiled_json(followed(json.loads(wanted.text)), wanted)
            case "json_object":
                return self._compiled_json({"type": "object"}, wanted)
            case "regex":
                return self._compiler.compile_regex(followed_expression(wanted.text))
            case "choice":
                choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(wanted.text))
                return self._compiler.compile_grammar_from_strings(f"root ::= {choices}", "root")
            case "grammar":
                if is_gbnf(wanted.text):
                    return self._compiler.compile_grammar_from_strings(wanted.text, "root")
                lark = with_texts(wanted.text, for_xgrammar)
                return self._compiler.compile_lark(with_schemas_in_lark(lark, followed_within), [], [])
            case "structural_tag":
                form = with_schemas(format_of(json.loads(wanted.text)), followed_within)
                form = with_patterns(form, followed_expression)
                return self._compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))

    def _compiled_json(self, schema: Any, wanted: StructuredOutput) -> Any:
        if wanted.whitespace_pattern:
            raise ValueError("xgrammar has no whitespace_pattern")
        any_whitespace, is_strict = not wanted.disable_any_whitespace, False
        return self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace, None, (",", ":"), is_strict, None, False
        )


def _has_json(wanted: StructuredOutput) -> bool:
    """Whether it is a grammar that contains JSON values, such as that of a named tool call."""
    return wanted.kind == "grammar" and "%json" in wanted.text


BACKEND = XGrammarBackend


def version() -> str:
    return metadata.version(PACKAGE)


def _forced_text(matcher: Any) -> bytes:
    """The bytes that must come next. The library returns them as text, which fails to decode if the last token ended
    within a character."""
    try:
        return str(matcher.find_jump_forward_string()).encode()
    except UnicodeDecodeError as error:
        return error.object


def _fill_drafted(position: XGrammarMatcher, index: int, drafts: list[int], masks: np.ndarray) -> None:
    matcher = position.matcher
    with position.step(), position.tried() as tried:
        for nth in range(len(drafts) + 1):
            if nth > tried.count or matcher.is_terminated():
                masks[index + nth] = -1  # tokens after the end, or after a draft that is not allowed, are dropped
                continue
            matcher.fill_next_token_bitmask(masks, index + nth, False)
            masks[index + nth] &= position.forbidden.others
            if nth < len(drafts):
                tried.take(drafts[nth])


def _tokens(tokenizer: Any, vocab_size: int) -> list[str]:
    """The tokens' texts by id, as in the tokenizer's file; "" for ids without a token."""
    vocab = tokenizer["model"]["vocab"]
    by_id = {index: piece for index, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else {}
    if isinstance(vocab, dict):
        by_id = {token_id: piece for piece, token_id in vocab.items()}
    by_id |= {each["id"]: each["content"] for each in tokenizer.get("added_tokens", ())}
    return [by_id.get(token_id, "") for token_id in range(vocab_size)]


def _without_place(said: str) -> str:
    """The library's message without its time and source location."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", said)
