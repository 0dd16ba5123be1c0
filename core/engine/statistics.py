"""Counters of the loop: sums over the engine's life for EngineStats, and rates over the last seconds for the log.

From two readings of the sums a client computes the mean between them. No times are kept per request: a token after the
first is assumed to have taken the time since the previous step, which is wrong only after a preemption.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from typing import NamedTuple

from headrace.core.schedule.requests import Request
from headrace.core.schedule.scheduler import Advance, Scheduler
from headrace.ipc.messages import STEP_TOKEN_BOUNDS, EngineTimes, ExpertBalance
from headrace.ipc.step import StepResult

logger = logging.getLogger(__name__)
LOG_EVERY_S = 10.0


class StepGaps:
    """How long the model is idle between consecutive steps: the cost of planning and sending outputs.

    Counts only steps for which the executor reports when the forward pass began and ended.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of gaps: steps that followed another step without waiting for work."""
        self.gap_s = 0.0
        self.forward_s = 0.0
        self._last_ended_s = 0.0  # 0 if the next step begins after idle time

    def step(self, result: StepResult) -> None:
        """Counts a step. Results come in order."""
        if not result.ended_s:
            return
        if self._last_ended_s:
            self.count += 1
            self.gap_s += max(0.0, result.began_s - self._last_ended_s)
        # With a pipeline, a pass may begin while the previous one still runs in another stage.
        self.forward_s += result.ended_s - max(result.began_s, self._last_ended_s)
        self._last_ended_s = result.ended_s

    def idle(self) -> None:
        """No work is left: the time until the next step is not a gap."""
        self._last_ended_s = 0.0


class Statistics:
    """Sums up the steps, finished requests and garbage collections that the loop reports."""

    def __init__(self, scheduler: Scheduler, *, log_stats: bool) -> None:
        self.gaps = StepGaps()
        self.num_steps = self.num_finished = self.num_generated_tokens = 0
        self.expert_balance: ExpertBalance | None = None
        self._num_first_tokens = self._num_later_tokens = self._num_gc_pauses = 0
        self._first_token_s = self._later_token_s = self._request_s = self._gc_pause_s = 0.0
        self._last_step_s = 0.0  # 0 if the next step begins after idle time
        self._num_prompt_tokens = 0
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._window = _Window(scheduler, log_stats)

    def step(self, result: StepResult, advance: Advance, num_prompt_tokens: int, now_s: float) -> None:
        """Counts a step that ended at now_s and whose outputs have been sent. num_prompt_tokens: prompt tokens that it
        computed."""
        self.gaps.step(result)
        num_generated_tokens, last_s = len(advance.token_ids), self._last_step_s
        self.num_steps += 1
        self._last_step_s = now_s
        if result.expert_balance is not None:
            self.expert_balance = result.expert_balance
        self._num_prompt_tokens += num_prompt_tokens
        self.num_generated_tokens += num_generated_tokens
        self._step_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_prompt_tokens + num_generated_tokens)] += 1
        num_first = len(advance.first)
        if last_s:
            self._num_later_tokens += len(result.token_ids) - num_first
            # With drafts a row gets several tokens in one step: together they took the time since the previous step.
            self._later_token_s += (len(result.rows) - num_first) * (now_s - last_s)
        if num_first:
            self._num_first_tokens += num_first
            self._first_token_s += sum(request.first_token_s - request.arrived_s for request in advance.first)
        if now_s >= self._window.ends_s:
            totals = Totals(self._num_prompt_tokens, self.num_generated_tokens, self.gaps.count, self.gaps.gap_s)
            self._window.end(totals)

    def ended(self, request: Request) -> None:
        self.num_finished += 1
        self._window.finished += 1
        self._request_s += time.monotonic() - request.arrived_s

    def idle(self) -> None:
        """No work is left: the time until the next step counts for no token."""
        self._last_step_s = 0.0
        self.gaps.idle()

    def gc_pause(self, seconds: float) -> None:
        self._num_gc_pauses += 1
        self._gc_pause_s += seconds

    def seconds_per_request(self) -> float:
        """Mean time between finished requests in the last window; 0 if none has finished."""
        rate = self._window.requests_per_s()
        return 1.0 / rate if rate else 0.0

    def times(self) -> EngineTimes:
        return EngineTimes(
            num_first_tokens=self._num_first_tokens,
            first_token_s=self._first_token_s,
            num_later_tokens=self._num_later_tokens,
            later_token_s=self._later_token_s,
            request_s=self._request_s,
            num_gc_pauses=self._num_gc_pauses,
            gc_pause_s=self._gc_pause_s,
            step_tokens=tuple(self._step_tokens),
            step_tokens_sum=self._num_prompt_tokens + self.num_generated_tokens,
        )


class Totals(NamedTuple):
    """Sums over the engine's life, at one moment."""

    prompt_tokens: int
    generated_tokens: int
    gaps: int
    gap_s: float


class _Window:
    """A window of about LOG_EVERY_S of activity, and the log line at its end."""

    def __init__(self, scheduler: Scheduler, log_stats: bool) -> None:
        self._scheduler = scheduler
        self.finished = 0
        self._log_stats = log_stats
        self._before = Totals(0, 0, 0, 0.0)
        self._since_s = time.monotonic()
        self.ends_s = self._since_s + LOG_EVERY_S
        self._last_requests_per_s = 0.0

    def end(self, now: Totals) -> None:
        scheduler, now_s = self._scheduler, time.monotonic()
        elapsed_s = now_s - self._since_s
        if self._log_stats and elapsed_s < 2 * LOG_EVERY_S:  # a longer one includes idle time: no useful rates
            pool, before = scheduler.pool, self._before
            logger.info(
                "%d running, %d waiting; prompt %.0f tok/s, output %.0f tok/s; KV cache %.1f%% in use%s",
                scheduler.num_running,
                len(scheduler.waiting),
                (now.prompt_tokens - before.prompt_tokens) / elapsed_s,
                (now.generated_tokens - before.generated_tokens) / elapsed_s,
                100 * (1 - pool.num_available / (pool.num_blocks - 1)),
                self._gap_text(now, elapsed_s),
            )
        self._last_requests_per_s = self.finished / elapsed_s
        self.finished = 0
        self._before, self._since_s, self.ends_s = now, now_s, now_s + LOG_EVERY_S

    def requests_per_s(self) -> float:
        return self._last_requests_per_s or self.finished / max(time.monotonic() - self._since_s, 1e-3)

    def _gap_text(self, now: Totals, elapsed_s: float) -> str:
        count, gap_s = now.gaps - self._before.gaps, now.gap_s - self._before.gap_s
        if not count:
            return ""
        return f"; {1e6 * gap_s / count:.0f} us between forward passes, {100 * gap_s / elapsed_s:.1f}% of the time"
