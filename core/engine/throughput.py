"""Rates over the last seconds: for the log line, and for telling a refused client when to come back."""

from __future__ import annotations

import logging
import time

from headrace.core.engine.step_gaps import StepGaps
from headrace.core.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)
LOG_EVERY_S = 10.0


class Throughput:
    """Counts since the last window; a window is about LOG_EVERY_S of activity."""

    def __init__(self, gaps: StepGaps, *, log_stats: bool) -> None:
        self.num_generated_tokens = 0
        self._log_stats = log_stats
        self._gaps, self._gaps_before = gaps, (0, 0.0)
        self._prompt_tokens = self._generated_tokens = self._finished = 0
        self._since_s = time.monotonic()
        self._requests_per_s = 0.0

    def step(self, num_prompt_tokens: int, num_generated_tokens: int, scheduler: Scheduler) -> None:
        self.num_generated_tokens += num_generated_tokens
        self._prompt_tokens += num_prompt_tokens
        self._generated_tokens += num_generated_tokens
        elapsed_s = time.monotonic() - self._since_s
        if elapsed_s < LOG_EVERY_S:
            return
        if self._log_stats and elapsed_s < 2 * LOG_EVERY_S:  # a longer window was idle in between: no rate at all
            pool = scheduler.pool
            logger.info(
                "%d running, %d waiting; prompt %.0f tok/s, output %.0f tok/s; KV cache %.1f%% in use%s",
                scheduler.num_running,
                len(scheduler.waiting),
                self._prompt_tokens / elapsed_s,
                self._generated_tokens / elapsed_s,
                100 * (1 - pool.num_available / (pool.num_blocks - 1)),
                self._gap_text(elapsed_s),
            )
        self._gaps_before = (self._gaps.count, self._gaps.gap_s)
        self._requests_per_s = self._finished / elapsed_s
        self._prompt_tokens = self._generated_tokens = self._finished = 0
        self._since_s = time.monotonic()

    def _gap_text(self, elapsed_s: float) -> str:
        count, gap_s = self._gaps.count - self._gaps_before[0], self._gaps.gap_s - self._gaps_before[1]
        if not count:
            return ""
        return f"; {1e6 * gap_s / count:.0f} us between forward passes, {100 * gap_s / elapsed_s:.1f}% of the time"

    def finished(self) -> None:
        self._finished += 1

    def seconds_per_request(self) -> float:
        """Mean time between two finished requests; 0 while nothing has finished."""
        rate = self._requests_per_s or self._finished / max(time.monotonic() - self._since_s, 1e-3)
        return 1.0 / rate if rate else 0.0
