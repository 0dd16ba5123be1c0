"""Where a step's wall time goes, in phases that sum to it: from one `collect`'s end to the next.

Recorded always: a phase costs two reads of the clock. The device's own time is inside `wait`, as far as the host was
ahead of it. `DeviceClock` tells when steps began and ended on the device, in the host's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from headrace.executor.gpu.device_state import Device, Mark
from headrace.ipc.step import StepResult

KEPT_STEPS = 4096
_NO_RANGE = nullcontext()
MOST_LATE_S = 1e-3
"""A host that waited for a step comes back this long after its end at most; what seems longer is the clocks' drift."""


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if torch.version.cuda else _NO_RANGE:
        yield


class StepTimes:
    """Seconds per phase of the last steps. `core` is what passes outside this process's runner: the core's own work."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        """Per step, oldest first: seconds by phase, with `total_s` and `num_sampled`."""
        self.as_ranges = False
        """While a profile is recorded: phases are ranges of torch's profiler, and of NVTX where there is CUDA."""
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
        """A step was started; the first begins the account."""
        if not self._began_s:
            self._began_s = time.perf_counter()
            self._phases = {}

    def collected(self, result: StepResult) -> None:
        """A step's result was read: its account closes, and the next one opens."""
        now_s = time.perf_counter()
        total_s = now_s - self._began_s
        self._phases["core"] = total_s - sum(self._phases.values())
        self.steps.append({**self._phases, "total_s": total_s, "num_sampled": float(len(result.rows))})
        self._phases, self._began_s = {}, now_s

    def idle(self) -> None:
        """Nothing runs: the time until the next step is nobody's."""
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


class DeviceClock:
    """Chains steps by the device's own clock, to a moment at which the host waited for one: what lies between two
    steps is then as exact as the device's clock, and the whole is never later than the host's."""

    def __init__(self, device: Device) -> None:
        self._last = device.mark()  # the step's before; it must not be recorded anew before the next call
        self._last.record()
        self._last.synchronize()
        self._last_s = time.monotonic()

    def times(self, began: Mark, ended: Mark, waited: bool) -> tuple[float, float]:
        """(began_s, ended_s) on time.monotonic(), of the next step; both marks have passed.

        waited: the host has just waited for the end, so that it is now.
        """
        now_s = time.monotonic()
        ended_s = self._last_s + ended.seconds_since(self._last)
        if ended_s > now_s or (waited and now_s - ended_s > MOST_LATE_S):
            ended_s = now_s
        self._last, self._last_s = ended, ended_s
        return ended_s - ended.seconds_since(began), ended_s
