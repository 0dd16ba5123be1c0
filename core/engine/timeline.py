"""A trace of the loop for ui.perfetto.dev: the core's work in one track, the model's forward passes in another.

Trace-event format (JSON object form, complete events of phase X; times in microseconds).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.schedule.scheduler import Advance
from headrace.ipc.process.private_files import private_opener
from headrace.ipc.step import StepPlan, StepResult

MOST_SPANS = 1_000_000
"""Limit of a profile that is never stopped."""
CORE, MODEL = 1, 2


class Timeline:
    """Spans recorded since its construction. Only one thread may use it."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, float, float, dict[str, int]]] = []

    def timed(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `run` with the arguments and records the call as a span."""
        began_s = time.monotonic()
        try:
            return run(*arguments)
        finally:
            self._add(name, CORE, began_s, time.monotonic(), {})

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """Records the forward pass of a step, with the times that the worker reports."""
        if result.ended_s:
            of_step = {"step": plan.step, "rows": len(plan.rows), "tokens": plan.total_tokens}
            self._add("forward", MODEL, result.began_s, result.ended_s, of_step)

    def write(self, path: Path) -> None:
        """Writes the trace as JSON. Raises OSError."""
        pid = os.getpid()
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": track, "args": {"name": name}}
            for track, name in ((CORE, "core"), (MODEL, "model"))
        ]
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": pid,
                "tid": track,
                "ts": began * 1e6,
                "dur": (end - began) * 1e6,
                "args": a,
            }
            for name, track, began, end, a in self._spans
        ]
        with open(path, "wb", opener=private_opener) as file:
            file.write(msgspec.json.encode({"traceEvents": events}))

    def _add(self, name: str, track: int, began_s: float, ended_s: float, args: dict[str, int]) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append((name, track, began_s, ended_s, args))


class Stages:
    """The loop's functions for one step. While a profile is recorded, each call is also recorded as a span."""

    def __init__(
        self,
        schedule: Callable[[], StepPlan | None],
        submit: Callable[[StepPlan], None],
        collect: Callable[[], StepResult],
        answer: Callable[..., Advance],
    ) -> None:
        self.schedule, self.submit, self.collect, self.answer = schedule, submit, collect, answer
        self._plain = dict(vars(self))

    def record(self, timeline: Timeline | None) -> None:
        """Records calls in `timeline` from now on. None: records nothing."""
        for name, run in self._plain.items():
            setattr(self, name, run if timeline is None else functools.partial(timeline.timed, name, run))
