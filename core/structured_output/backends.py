"""Chooses the library for a request's grammar. No library is loaded in the engine: a trial tries the grammar unless it
is plain, and then another process follows it (helper/process.py), which the first request that needs it, or `prepare`,
starts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np

from headrace.core.options.structured_outputs import BACKENDS, WHITESPACE, StructuredOutputs
from headrace.core.structured_output.backend import Matcher, Vocabulary
from headrace.core.structured_output.follower import FollowedMatcher, Follower
from headrace.core.structured_output.held_memory import HeldMemory
from headrace.core.structured_output.helper.trial import OTHER, PLAIN, QUICK_BYTES, Trial
from headrace.core.structured_output.plain import is_plain
from headrace.core.structured_output.thinking import allow, for_forms, free_of_form, split
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput

logger = logging.getLogger(__name__)


class Backends:
    """The libraries of a plan: a grammar that the first library refuses is tried with the next."""

    def __init__(self, options: StructuredOutputs, vocabulary: Vocabulary) -> None:
        self._options, self._vocabulary = options, vocabulary
        self._follower = Follower(vocabulary, options.backends[0])
        self._trial = Trial(self._follower.helper)
        self._memory = HeldMemory()
        self._used = set[str]()

    def compile(self, wanted: StructuredOutput) -> Matcher:
        """Has the grammar tried, and then compiled to be followed. Raises QueueFullError if there is no memory."""
        if not self._vocabulary.tokenizer_json:
            raise InvalidRequestError(
                "SamplingParams.structured_outputs needs the model's tokenizer, and the engine runs without one "
                "(skip_tokenizer_init)"
            )
        options = self._options
        without = wanted.disable_any_whitespace or options.disable_any_whitespace
        wanted = msgspec.structs.replace(
            wanted,
            disable_any_whitespace=without,
            whitespace_pattern=wanted.whitespace_pattern or ("" if without else self._whitespace(wanted.backend)),
            disable_additional_properties=wanted.disable_additional_properties or options.disable_additional_properties,
        )
        first, *others = self._named(wanted.backend)
        try:
            return self._compile(first, wanted)
        except InvalidRequestError as error:
            if options.disable_fallback or wanted.disable_fallback:
                raise
            for name in others:
                try:
                    matcher = self._compile(name, wanted)
                except InvalidRequestError:
                    continue  # report the first library's reason
                logger.info("a grammar is compiled by %s, which the first backend refuses: %s", name, error)
                return matcher
            raise

    def prepare(self) -> None:
        """Loads the first library before a request needs it."""
        with contextlib.suppress(HeadraceError):  # the first request gets the error
            self.compile(StructuredOutput(kind="regex", text="a"))

    def advance(self, passed: Sequence[tuple[Matcher, list[int]]]) -> None:
        """Tells which tokens the matchers are to accept next, so that one message passes them all on."""
        if ahead := for_forms(passed):
            self._follower.advance(cast(list[tuple[FollowedMatcher, list[int]]], ahead))

    def num_valid(self, tried: Sequence[tuple[Matcher, list[int]]]) -> list[int]:
        """`Matcher.num_valid` of each with its tokens, asked for in one message."""
        found, left = list[int](), list[tuple[int, FollowedMatcher, list[int]]]()
        for nth, (matcher, token_ids) in enumerate(tried):
            num, form, rest = free_of_form(matcher, token_ids)
            found.append(num)
            if form is not None:
                left.append((nth, cast(FollowedMatcher, form), rest))
        of_forms = self._follower.num_valid([(form, rest) for _, form, rest in left])
        for (nth, *_), num in zip(left, of_forms, strict=True):
            found[nth] += num
        return found

    def begin(self, positions: Sequence[tuple[Matcher, int, list[int]]]) -> Callable[[np.ndarray], None]:
        """Begins to make the masks of the tokens allowed next, for matchers that do not advance until they are written.
        The result writes them into `masks`, [num_masks, num_words] int32, as in TokenMasks.

        A position is given as a matcher, the index of its mask, and draft tokens that its grammar allows. The masks
        after each draft token follow at the next indices.
        """
        left, own, openers = split(positions)
        begun = self._follower.begin(cast(Sequence[tuple[FollowedMatcher, int, list[int]]], left)) if left else None

        def write(masks: np.ndarray) -> None:
            for matcher, at, drafts in own:
                matcher.fill_own(at, drafts, masks)
            if begun is not None:
                begun.write(masks)
            for at, token_id in openers:
                allow(masks[at], token_id)

        return write

    def stop(self) -> None:
        self._follower.stop()

    def _named(self, backend: str) -> Sequence[str]:
        if backend in ("", "auto"):
            return self._options.backends
        if backend not in BACKENDS:
            raise InvalidRequestError(
                f"SamplingParams.structured_outputs.backend is {backend!r}; allowed: {', '.join(BACKENDS)}"
            )
        return BACKENDS[backend]

    def _whitespace(self, backend: str) -> str:
        """That of the backend between the parts of JSON."""
        return self._options.whitespace_pattern if backend in ("", "auto") else WHITESPACE.get(backend, "")

    def _compile(self, name: str, wanted: StructuredOutput) -> Matcher:
        lane, matcher = OTHER, None
        if is_plain(wanted):
            lane = PLAIN
            matcher = self._follower.compile_untried(name, wanted, self._memory.hold(QUICK_BYTES))
        if matcher is None:
            held = self._memory.hold(self._trial.check(name, wanted, lane))
            matcher = self._follower.compile(name, wanted, held)
        if name not in self._used:
            self._used.add(name)
            logger.info("structured outputs use the backend %s", name)
        return matcher
