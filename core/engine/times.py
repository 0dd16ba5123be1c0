"""How long requests wait for what: sums over the engine's life, so that two looks give the means of the time between.

Nothing here is per request: a token after the first is taken to have waited since the step before, which holds for
all but those whose request was preempted.
"""

from __future__ import annotations

import time

from headrace.core.schedule.requests import Request
from headrace.ipc.messages import EngineTimes


class Times:
    """Told of steps, first tokens, ends and garbage collections by the loop."""

    def __init__(self) -> None:
        self._num_first_tokens = self._num_later_tokens = self._num_gc_pauses = 0
        self._first_token_s = self._later_token_s = self._request_s = self._gc_pause_s = 0.0
        self._last_step_s = self._interval_s = 0.0  # 0 for a step that follows on nothing

    def step(self, num_tokens: int) -> None:
        """A step has ended, with so many tokens."""
        now_s = time.monotonic()
        self._interval_s = now_s - self._last_step_s if self._last_step_s else 0.0
        self._last_step_s = now_s
        if self._interval_s:
            self._num_later_tokens += num_tokens
            self._later_token_s += num_tokens * self._interval_s

    def first_token(self, request: Request) -> None:
        """One of the last step's tokens is the first of this request, whose `first_token_s` is set."""
        self._num_first_tokens += 1
        self._first_token_s += request.first_token_s - request.arrived_s
        if self._interval_s:
            self._num_later_tokens -= 1
            self._later_token_s -= self._interval_s

    def ended(self, request: Request) -> None:
        self._request_s += time.monotonic() - request.arrived_s

    def idle(self) -> None:
        """Nothing was left to do: no token waits for the next step."""
        self._last_step_s = 0.0

    def gc_pause(self, seconds: float) -> None:
        self._num_gc_pauses += 1
        self._gc_pause_s += seconds

    def sums(self) -> EngineTimes:
        return EngineTimes(
            num_first_tokens=self._num_first_tokens,
            first_token_s=self._first_token_s,
            num_later_tokens=self._num_later_tokens,
            later_token_s=self._later_token_s,
            request_s=self._request_s,
            num_gc_pauses=self._num_gc_pauses,
            gc_pause_s=self._gc_pause_s,
        )
