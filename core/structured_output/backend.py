"""The interface of a grammar library (`Backend`, `Matcher`). Only a NAME_backend.py file imports its library."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from headrace.ipc.failure import HeadraceError, InvalidRequestError, let_interrupts_pass
from headrace.ipc.messages import StructuredOutput

MOST_FORCED = 1024
"""Most forced tokens that are found at once: a forced text may have millions, and the loop's thread waits for them."""

MOST_STEP_S = 0.1
"""CPU time limit for one call of a library about one state (a mask, the forced tokens, a token to accept): other
requests wait meanwhile."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The data of the model that a grammar library needs."""

    tokenizer_json: bytes
    """The tokenizer in the `tokenizers` library's format; empty if the engine runs without one."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def still_forced(forced: list[int] | None, token_id: int) -> list[int] | None:
    """The forced tokens that remain after token_id, if it was the first of several; None if they must be recomputed.
    Computing thousands of forced tokens anew after each of them would take milliseconds."""
    return forced[1:] if forced is not None and len(forced) > 1 and forced[0] == token_id else None


class Guarded:
    """Base class of matchers: what a library does for one of them harms no other.

    Some grammars are cheap at first, and slower with every token: ambiguous ones take seconds per mask after a hundred.
    """

    stopped = ""
    """Why the matcher cannot continue: a step took longer than MOST_STEP_S, or the library failed in it."""

    def step(self) -> _Step:
        """A context for each use of the library, which ends there if the library raises."""
        return _Step(self)


class _Step:
    __slots__ = ("_began_s", "_matcher")

    def __init__(self, matcher: Guarded) -> None:
        self._matcher = matcher

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            let_interrupts_pass(error)
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):  # as C++ names it
                self._matcher.stopped = "following the grammar takes more than the memory that it may use"
            else:
                self._matcher.stopped = f"the library that follows the grammar failed: {error!r}"
        elif time.thread_time() - self._began_s > MOST_STEP_S:
            limit = f"{MOST_STEP_S:g} s for one token, the most it may"
            self._matcher.stopped = f"following the grammar takes more than {limit}"
        return True


class Matcher(Protocol):
    """The state of one answer in its grammar. It depends only on the tokens that it has accepted."""

    def accept(self, token_id: int) -> bool:
        """Accepts the answer's next token. False if the grammar does not allow it; the matcher is then unusable."""
        ...

    @property
    def is_complete(self) -> bool:
        """The answer has ended, or only an end-of-sequence token may follow."""
        ...

    @property
    def problem(self) -> str:
        """Why the matcher cannot continue (a limit that it reached); "" if it can."""
        ...

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows next. Accepts none of them."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, as the tokenizer would write their text; [] if there is a choice.

        At most MOST_FORCED tokens; the rest is returned after these have been accepted.
        """
        ...

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...


class FormMatcher(Matcher, Protocol):
    """One of a library."""

    @property
    def backend(self) -> Backend:
        """The backend that fills its masks."""
        ...

    def copy(self) -> FormMatcher: ...


class Backend(Protocol):
    """One grammar library with one tokenizer. Several threads may call `compile` at the same time."""

    def compile(self, wanted: StructuredOutput) -> FormMatcher:
        """A matcher at the start of the grammar. Raises InvalidRequestError with the library's reason."""
        ...

    def forget(self) -> None:
        """Clears what earlier compilations left in caches."""
        ...

    def fill(self, positions: Sequence[tuple[FormMatcher, int, list[int]]], masks: np.ndarray) -> None:
        """Writes the masks of the tokens allowed next into `masks`, [num_masks, num_words] int32, as in TokenMasks.

        A position is given as a matcher, the index of its mask, and draft tokens that its grammar allows. The masks
        after each draft token follow at the next indices.
        """
        ...


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Loads a library, in up to a second. Raises InvalidRequestError if it is missing or cannot read the tokenizer."""
    try:
        module = importlib.import_module(f"headrace.core.structured_output.{name}_backend")
        backend: Backend = module.BACKEND(
            vocabulary.tokenizer_json.decode(), vocabulary.vocab_size, vocabulary.eos_token_ids
        )
        return backend
    except ModuleNotFoundError as error:
        raise InvalidRequestError(f"{name} cannot be used: the engine lacks {error.name}; pip install {name}") from None
    except HeadraceError:
        raise
    except Exception as error:  # libraries raise various types for an unknown kind of tokenizer
        raise InvalidRequestError(f"{name} cannot read this model's tokenizer: {error}") from error
