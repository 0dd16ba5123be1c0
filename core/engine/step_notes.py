"""Notes when the steps of some requests were planned and computed, for traces that show each step."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from headrace.core.schedule.requests import Request, State
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import NUM_STEP_TIMES
from headrace.ipc.step import StepPlan, StepResult

MOST_STEPS = 1024
"""Of one request; further ones are not noted."""


class Noted(NamedTuple):
    """A step of a request that has been submitted."""

    request: Request
    num_tokens: int
    planned_s: float
    submitted_s: float


class StepNotes:
    """The requests whose steps are noted. Those that have ended are forgotten at the next step."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        request.step_times = []
        self._requests.append(request)

    def submitted(self, plan: StepPlan, planned_s: float) -> list[Noted]:
        """The requests of a step that is about to be submitted. planned_s: when its planning began."""
        self._requests = [each for each in self._requests if each.state is not State.FINISHED]
        now_s, found = time.monotonic(), []
        for request in self._requests:
            if request.state is State.RUNNING and (at := np.flatnonzero(plan.rows == request.row)).size:
                found.append(Noted(request, int(plan.num_tokens[at[0]]), planned_s, now_s))
        return found


def note_results(noted: list[Noted], result: StepResult) -> None:
    """Completes the notes of a step: its result has just come."""
    now_s = time.monotonic()
    for request, num_tokens, planned_s, submitted_s in noted:
        if len(request.step_times) == MOST_STEPS:
            continue
        is_timed = submitted_s <= result.began_s <= result.ended_s <= now_s  # by a clock of this host
        of_pass = (result.began_s, result.ended_s) if is_timed else ()
        times = [each - request.arrived_s for each in (planned_s, submitted_s, now_s, *of_pass)]
        request.step_times.append((*times, *(() if is_timed else (0.0, 0.0)), num_tokens))


def told_steps(request: Request) -> Tensor | None:
    """The notes of a request as its Finish has them."""
    if not request.step_times:
        return None
    return Tensor.from_numpy(np.array(request.step_times, np.float64).reshape(-1, NUM_STEP_TIMES))
