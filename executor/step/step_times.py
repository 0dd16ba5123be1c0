"""Measures a step's wall time, from one `collect`'s end to the next, in phases that sum to it.

Always on, since a phase costs only two reads of the clock. The device's time appears in `wait`, as far as the host was
ahead of the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from headrace.ipc.step import StepResult

KEPT_STEPS = 4096
_NO_RANGE = nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if torch.version.cuda else _NO_RANGE:
        yield


class StepTimes:
    """Seconds per phase of recent steps. Phase `core` is the time outside this runner, mostly the core's work."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        """Per step, oldest first: seconds by phase, with `total_s` and `num_sampled`."""
        self.as_ranges = False
        """True while a profile is recorded: phases become ranges of torch's profiler and, with CUDA, of NVTX."""
        self._phases: dict[str, float] = {}
        self._began_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            with _range(name) if self.as_ranges else _NO_RANGE:
                yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - began_s

    def submitted(self) -> None:
        """A step was started; the first one starts the measurement."""
        if not self._began_s:
            self._began_s = time.perf_counter()
            self._phases = {}

    def collected(self, result: StepResult) -> None:
        """A step's result was read, which ends its time and starts the next step's."""
        now_s = time.perf_counter()
        total_s = now_s - self._began_s
        self._phases["core"] = total_s - sum(self._phases.values())
        self.steps.append({**self._phases, "total_s": total_s, "num_sampled": float(len(result.rows))})
        self._phases, self._began_s = {}, now_s

    def idle(self) -> None:
        """Nothing runs: the time until the next step is not counted."""
        self._phases, self._began_s = {}, 0.0

    def summary(self) -> dict[str, float]:
        """Means over the kept steps, in microseconds by phase; they sum to `total_us`."""
        count = len(self.steps)
        if not count:
            return {}
        names = sorted({name for step in self.steps for name in step} - {"num_sampled", "total_s"})
        mean_us = {f"{name}_us": 1e6 * sum(step.get(name, 0.0) for step in self.steps) / count for name in names}
        total_us = 1e6 * sum(step["total_s"] for step in self.steps) / count
        return {**mean_us, "total_us": total_us, "num_steps": float(count)}
