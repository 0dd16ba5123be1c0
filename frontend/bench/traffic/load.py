"""Sends requests at their scheduled times and records the outcome of each. An open loop: it does not wait for answers.

With a schedule, latencies count from when a request was due, so that a late generator makes figures worse and not
better (no coordinated omission; Tene 2013). With a bound on concurrency, a request that is due may wait here for its
turn; that wait is recorded separately, and latencies count from when the request was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.frontend.bench.traffic.http_client import (
    CompletionStream,
    ExchangeError,
    Pool,
    WholeAnswer,
    event_decoder,
)

Tick = Callable[["Load"], None]
TICK_S = 0.25


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of one request. Times are in seconds; due_s, sent_s and end_s count from the start of the run."""

    index: int
    due_s: float | None = None
    sent_s: float = 0.0
    end_s: float = 0.0
    queued_s: float = 0.0
    """Wait in the client for the bound on concurrency."""
    ttft_s: float | None = None
    """Until the first piece. Like e2e_s, counted from when the request was due; from when it was sent if there is no
    schedule or a bound on concurrency."""
    e2e_s: float | None = None
    """Until the last piece; None if the request failed."""
    gaps_s: list[float] = []
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    cause: str = ""
    """Why the request failed, as one of a few texts; empty if it succeeded."""
    detail: str = ""
    text: str | None = None


class LoadResult(msgspec.Struct, kw_only=True):
    outcomes: list[Outcome]
    duration_s: float
    """From the start of the run to the end of the last request."""
    cpu_s: float
    """Processor time of this process during the run."""
    lateness_s: list[float]
    """For each request with a due time, how much later it was sent, without the wait for the bound on concurrency."""
    max_in_flight: int


class Load:
    """One run. `run` may be called once."""

    def __init__(
        self,
        pool: Pool,
        bodies: Sequence[bytes],
        *,
        due_s: Sequence[float] | None,
        max_concurrency: int | None,
        keep_text: bool,
        streams: bool = True,
    ) -> None:
        """bodies: whole requests as sent over the wire. due_s: seconds after the start; None sends all at once.
        streams: False: answers are not streams of tokens."""
        self._pool, self._bodies, self._due_s, self._keep_text = pool, bodies, due_s, keep_text
        self._turns = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._decoder, self._streams = event_decoder(), streams
        self._start_s = 0.0
        self._active: dict[int, CompletionStream | WholeAnswer] = {}
        self._outcomes: list[Outcome] = []
        self._num_done_tokens = 0
        self._max_in_flight = 0

    @property
    def num_requests(self) -> int:
        return len(self._bodies)

    @property
    def num_in_flight(self) -> int:
        return len(self._active)

    @property
    def num_done(self) -> int:
        return len(self._outcomes)

    @property
    def num_failed(self) -> int:
        return sum(1 for outcome in self._outcomes if outcome.cause)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far; unfinished requests count their pieces."""
        return self._num_done_tokens + sum(stream.num_pieces for stream in self._active.values())

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def run(self, tick: Tick | None = None) -> LoadResult:
        """Sends all requests, and waits for the end of the last. `tick` is called every TICK_S seconds."""
        gc.collect()
        gc.freeze()
        self._start_s, cpu_began_s = time.perf_counter(), time.process_time()
        ticker = asyncio.create_task(self._tick(tick)) if tick is not None else None
        tasks: list[asyncio.Task[None]] = []
        try:
            for index in range(len(self._bodies)):
                if self._due_s is not None:
                    await _until(self._start_s + self._due_s[index])
                tasks.append(asyncio.create_task(self._one(index)))
            await asyncio.gather(*tasks)
        finally:
            for task in [*tasks, *([ticker] if ticker else [])]:
                task.cancel()
            gc.unfreeze()
        cpu_s = time.process_time() - cpu_began_s
        outcomes = sorted(self._outcomes, key=lambda outcome: outcome.index)
        late = [o.sent_s - o.queued_s - o.due_s for o in outcomes if o.due_s is not None]
        return LoadResult(
            outcomes=outcomes,
            duration_s=max(outcome.end_s for outcome in outcomes),
            cpu_s=cpu_s,
            lateness_s=[max(0.0, each) for each in late],
            max_in_flight=self._max_in_flight,
        )

    async def _one(self, index: int) -> None:
        outcome = Outcome(index=index, due_s=None if self._due_s is None else self._due_s[index])
        asked_s = time.perf_counter()
        if self._turns is not None:
            await self._turns.acquire()
        stream = CompletionStream(self._decoder, keep_text=self._keep_text) if self._streams else WholeAnswer()
        self._active[index] = stream
        self._max_in_flight = max(self._max_in_flight, len(self._active))
        sent_s = time.perf_counter()
        try:
            await self._pool.send(self._bodies[index], stream)
            stream.finish()
        except ExchangeError as error:
            outcome.cause, outcome.detail = error.cause, error.detail
        finally:
            del self._active[index]
            if self._turns is not None:
                self._turns.release()
        outcome.sent_s, outcome.queued_s = sent_s - self._start_s, sent_s - asked_s if self._turns is not None else 0.0
        outcome.end_s = time.perf_counter() - self._start_s
        self._keep(outcome, stream, sent_s)

    def _keep(self, outcome: Outcome, stream: CompletionStream | WholeAnswer, sent_s: float) -> None:
        begin_s = sent_s if outcome.due_s is None or self._turns is not None else self._start_s + outcome.due_s
        if stream.first_s is not None:
            outcome.ttft_s = stream.first_s - begin_s
        if not outcome.cause:
            outcome.e2e_s = stream.last_s - begin_s
        outcome.gaps_s = stream.gaps_s
        outcome.num_prompt_tokens = stream.num_prompt_tokens
        outcome.num_output_tokens = stream.num_output_tokens or stream.num_pieces
        outcome.text = "".join(stream.text) if self._keep_text else None
        self._num_done_tokens += outcome.num_output_tokens
        self._outcomes.append(outcome)

    async def _tick(self, tick: Tick) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            tick(self)


class ProgressBar:
    """Live progress on stderr: requests done, the token rate of the last second, and requests in flight."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="req", dynamic_ncols=True, disable=not shown, smoothing=0)
        self._history: list[tuple[float, int]] = [(0.0, 0)]

    def tick(self, load: Load) -> None:
        now_s, tokens = load.elapsed_s, load.num_output_tokens
        self._history.append((now_s, tokens))
        while len(self._history) > 2 and now_s - self._history[0][0] > 1.0:
            self._history.pop(0)
        begin_s, before = self._history[0]
        rate = max(0, tokens - before) / max(1e-9, now_s - begin_s)
        failed = f", {load.num_failed} failed" if load.num_failed else ""
        self._bar.set_postfix_str(f"{rate:,.0f} out tok/s, {load.num_in_flight} in flight{failed}", refresh=False)
        self._bar.update(load.num_done - self._bar.n)

    def close(self, load: Load | None = None) -> None:
        if load is not None:
            self.tick(load)
        with contextlib.suppress(Exception):
            self._bar.close()


async def _until(at_s: float) -> None:
    """Sleeps until `at_s` of time.perf_counter. Loops, since uvloop's timers may fire up to a millisecond early."""
    while (wait_s := at_s - time.perf_counter()) > 0:
        await asyncio.sleep(wait_s)
