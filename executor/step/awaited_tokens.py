"""The tokens of a pipeline's last stage, which the other stages receive some steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from headrace.executor.parallel.rank_place import Collectives

MOST_UNKNOWN = 16
"""A stage waits when it lacks the tokens of more steps than this; far more than are ever in flight."""


class Awaited(Protocol):
    """A step that this stage has computed and whose sampled tokens have not arrived yet."""

    step: int


S = TypeVar("S", bound=Awaited)


class AwaitedTokens(Generic[S]):
    """The steps whose tokens have not arrived, oldest first."""

    def __init__(self, put: Callable[[S, np.ndarray, np.ndarray], None]) -> None:
        """put: receives a step, the row of each of its tokens (the tokens of a row are adjacent), and the tokens."""
        self.steps: deque[S] = deque()
        self._put = put

    def take(self, link: Collectives, is_needed: Callable[[], bool]) -> None:
        """Takes the tokens that have arrived, and waits while the next step needs tokens that have not."""
        while self.steps:
            taken = link.sampled(wait=is_needed() or len(self.steps) > MOST_UNKNOWN)
            if taken is None:
                return
            step, rows, token_ids = taken
            awaited = self.steps.popleft()
            if step != awaited.step:
                raise RuntimeError(f"tokens of step {step} came where those of step {awaited.step} were due")
            self._put(awaited, rows, token_ids)


def by_row(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows [num_tokens], a row's tokens adjacent -> each row once, and its number of tokens."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return rows[starts], np.diff(starts, append=len(rows))
