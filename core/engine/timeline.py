"""What the loop did when, as a trace for ui.perfetto.dev: the core's own work above, the model's forward passes below.

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
from headrace.ipc.step import StepPlan, StepResult

MOST_SPANS = 1_000_000
"""Of a profile that nobody stops."""
CORE, MODEL = 1, 2


class Timeline:
    """Spans since its making. For one thread."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, float, float, dict[str, int]]] = []

    def timed(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Runs what the loop does now."""
        began_s = time.monotonic()
        try:
            return run(*arguments)
        finally:
            self._add(name, CORE, began_s, time.monotonic(), {})

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """A forward pass, as the worker reports it."""
        if result.ended_s:
            of_step = {"step": plan.step, "rows": len(plan.rows), "tokens": plan.total_tokens}
            self._add("forward", MODEL, result.began_s, result.ended_s, of_step)

    def write(self, path: Path) -> None:
        """Raises OSError."""
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
        path.write_bytes(msgspec.json.encode({"traceEvents": events}))

    def _add(self, name: str, track: int, began_s: float, ended_s: float, args: dict[str, int]) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append((name, track, began_s, ended_s, args))


class Stages:
    """What the loop does for a step. Each is called as it is, and as a span while a profile is recorded."""

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
        """From the next call on; None: no profile is recorded."""
        for name, run in self._plain.items():
            setattr(self, name, run if timeline is None else functools.partial(timeline.timed, name, run))
