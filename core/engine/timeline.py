"""What the loop did when, as a trace for ui.perfetto.dev: the core's own work above, the model's forward passes below.

Trace-event format (JSON object form, complete events of phase X; times in microseconds).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.ipc.step import StepPlan, StepResult

MOST_SPANS = 1_000_000
"""Of a profile that nobody stops."""
CORE, MODEL = 1, 2


class Timeline:
    """Spans since its making. For one thread."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, float, float, dict[str, int]]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What the loop does now."""
        began_s = time.monotonic()
        try:
            yield
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
