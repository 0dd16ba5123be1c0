"""What a library of grammars does for the core. It is a backend's file that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from headrace.ipc.messages import StructuredOutput

MOST_FORCED = 1024
"""Tokens of a forced text that are found at once: a text may have millions, which the loop's thread would wait for."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What a grammar library needs to know of the model."""

    tokenizer_json: bytes
    """In the `tokenizers` library's form; empty where the engine runs without a tokenizer."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def still_forced(forced: list[int] | None, token_id: int) -> list[int] | None:
    """What remains of forced tokens after one, where it was the first of several; None where they have to be asked for
    again. To write a text of thousands of tokens anew after each of them takes milliseconds."""
    return forced[1:] if forced is not None and len(forced) > 1 and forced[0] == token_id else None


class Matcher(Protocol):
    """Where one answer stands in its grammar: a function of the tokens that it has accepted, and of nothing else."""

    @property
    def backend(self) -> Backend:
        """That fills its masks."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes the answer's next token. False, and never to be used again, where the grammar does not allow it."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow, or the end has come."""
        ...

    @property
    def problem(self) -> str:
        """Why it cannot go on: a limit that it met; "" while it can."""
        ...

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, might come next. Takes none of them."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, written as the tokenizer would write their text; [] where there is a choice.

        At most MOST_FORCED of them: the rest is asked for once these have come.
        """
        ...

    def copy(self) -> Matcher:
        """One at the same place, which goes its own way."""
        ...


class Backend(Protocol):
    """One library, for one tokenizer. `compile` may be called from several threads at once."""

    name: str
    computes_beforehand: bool
    """Compiling may take long even where the form is plain (`plain.py`)."""

    def compile(self, wanted: StructuredOutput) -> Matcher:
        """The beginning of the grammar. Raises InvalidRequestError with the library's reason."""
        ...

    def forget(self) -> None:
        """Drops what compiling has left to be used again."""
        ...

    def stop(self) -> None:
        """Ends what it has started."""

    def fill(self, places: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> None:
        """Writes which tokens may come next into masks [num_masks, num_words] int32, as TokenMasks has them.

        Each place is a matcher, the number of its mask, and drafts that it allows: the masks after each of those are
        the next ones.
        """
        ...
