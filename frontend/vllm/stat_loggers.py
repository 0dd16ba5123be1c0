"""User-defined loggers of an engine's load, with vLLM's interface: `from_engine_args(args, stat_loggers=[MyLogger])`.

A logger is constructed once the engine has started. Its `record` is called every second in which the engine ran steps,
and its `log` when `do_log_stats` is called. Counts of tokens and of running or waiting requests cover all clients of
the engine; finished requests are those of this client.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.frontend.client.control import QUICK_S
from headrace.frontend.client.engine_metrics import kv_use
from headrace.frontend.vllm.unsupported import no_attribute
from headrace.ipc.failure import EngineDeadError, HeadraceError, InvalidRequestError
from headrace.ipc.messages import GetStats

if TYPE_CHECKING:
    from headrace.frontend.client.request_stream import RequestStream
    from headrace.frontend.fleet.pool import EnginePool
    from headrace.frontend.vllm.engine_config import EngineConfig
    from headrace.ipc.messages import EngineStats

logger = logging.getLogger(__name__)
RECORD_EVERY_S = 1.0
_LAST_S = 1.0
"""How long a closing client waits for the engine's last statistics."""


class FinishReason(enum.IntEnum):
    """How a request ended; `str` gives the word that outputs have. FinishReason("stop") takes the word too."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


@dataclass
class PrefixCacheStats:
    """Prefix cache lookups since the previous record, in tokens."""

    queries: int = 0
    hits: int = 0


@dataclass
class SchedulerStats:
    """The engine's state at the time of the record."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    """Further waiting requests, which wait for something other than capacity, such as a grammar."""
    step_counter: int = 0
    kv_cache_usage: float = 0.0
    """Fraction of the KV blocks in use, 0 to 1."""
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)


@dataclass
class FinishedRequestStats:
    """One finished request of this client. Times are in seconds."""

    finish_reason: FinishReason
    request_id: str | None = None
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0


@dataclass
class IterationStats:
    """The engine's work since the previous record."""

    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    """Seconds; one for each request in `finished_requests` that produced a token."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            mean = "times between single tokens are not kept; mean_time_per_output_token of finished_requests tells"
            raise no_attribute("IterationStats", name, {"inter_token_latencies_iter": mean})


class StatLoggerBase(abc.ABC):
    """The base class of loggers. `engine_idx` is always 0: a client has one engine."""

    @abc.abstractmethod
    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None: ...

    @abc.abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None: ...

    @abc.abstractmethod
    def log_engine_initialized(self) -> None: ...

    def log(self) -> None:  # noqa: B027 - may be left out
        pass


class AggregateStatLoggerBase(StatLoggerBase):
    """The base class of loggers of all engines; constructed with engine_indexes=[0]."""

    @abc.abstractmethod
    def __init__(self, vllm_config: EngineConfig, engine_indexes: list[int]) -> None: ...


class LoggingStatLogger(StatLoggerBase):
    """vLLM's default logger, for scripts that pass or derive from it. It logs nothing itself: `do_log_stats` writes
    that line anyway."""

    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None:
        self.vllm_config, self.engine_index = vllm_config, engine_index
        self.last_scheduler_stats = SchedulerStats()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.last_scheduler_stats = scheduler_stats

    def log_engine_initialized(self) -> None:
        pass


class AggregatedLoggingStatLogger(LoggingStatLogger, AggregateStatLoggerBase):
    """The same as LoggingStatLogger, since there is one engine."""


Factory = Callable[[Any, Any], StatLoggerBase]


class StatLoggers:
    """The loggers of one client; runs in the client's event loop."""

    def __init__(self, factories: Sequence[Factory] | None) -> None:
        """Raises InvalidRequestError for a factory that is not callable."""
        self._factories = list(factories or ())
        for each in self._factories:
            if not callable(each):
                raise InvalidRequestError(f"stat_loggers has {each!r:.100}: give classes, or what makes a logger")
        self.loggers: list[StatLoggerBase] = []
        self._task: asyncio.Task[None] | None = None
        self._ended: list[RequestStream] = []
        self._last: EngineStats | None = None

    def check_number(self, num_engines: int) -> None:
        """Raises InvalidRequestError for several engines."""
        if num_engines != 1:
            raise InvalidRequestError(
                "stat_loggers: not supported with data_parallel_size above 1, as they receive the statistics of one "
                "engine; leave them out"
            )

    async def start(self, client: EnginePool, config: EngineConfig) -> None:
        """Constructs the loggers, and begins to call them."""
        if not self._factories:
            return
        self._client = client
        for make in self._factories:
            is_aggregate = isinstance(make, type) and issubclass(make, AggregateStatLoggerBase)
            self.loggers.append(make(config, [0] if is_aggregate else 0))
        self._tell("log_engine_initialized")
        self._last = await client.get_stats()
        client.ended = self._ended
        self._task = asyncio.create_task(self._watch())

    async def log(self) -> None:
        """Records what is new, and calls each logger's `log`."""
        if self.loggers:
            await self._record()
            self._tell("log")

    async def stop(self) -> None:
        """Records what is new for the last time. May be called again."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            with contextlib.suppress(HeadraceError):
                await self._record(_LAST_S)

    async def _watch(self) -> None:
        with contextlib.suppress(EngineDeadError):
            while True:
                await asyncio.sleep(RECORD_EVERY_S)
                await self._record()

    async def _record(self, timeout_s: float = QUICK_S) -> None:
        stats: EngineStats = await self._client.call(GetStats, timeout_s)
        before = self._last
        assert before is not None, "start has asked for the first"
        ended, self._ended[:] = list(self._ended), []
        if stats.steps == before.steps and not ended:
            return
        self._last = stats
        self._tell("record", _scheduler_stats(stats, before), _iteration_stats(stats, before, ended), None, 0)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of every logger. One that raises is removed, so that the others and the requests go on."""
        for each in tuple(self.loggers):
            try:
                getattr(each, method)(*arguments)
            except BaseException:  # SystemExit too, as this is not the user's thread
                logger.exception("%s.%s failed; it is not called any more", type(each).__name__, method)
                self.loggers.remove(each)


def _scheduler_stats(stats: EngineStats, before: EngineStats) -> SchedulerStats:
    prefix = PrefixCacheStats(
        queries=stats.num_prompt_tokens - before.num_prompt_tokens,
        hits=stats.num_cached_prompt_tokens - before.num_cached_prompt_tokens,
    )
    skipped = sum(count for reason, count in stats.num_waiting_by_reason.items() if reason != "capacity")
    return SchedulerStats(
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting - skipped,
        num_skipped_waiting_reqs=skipped,
        step_counter=stats.steps,
        kv_cache_usage=kv_use(stats),
        prefix_cache_stats=prefix,
    )


def _iteration_stats(stats: EngineStats, before: EngineStats, ended: Sequence[RequestStream]) -> IterationStats:
    latencies = [each.metrics.first_token_latency for each in ended]
    return IterationStats(
        num_generation_tokens=stats.num_generated_tokens - before.num_generated_tokens,
        num_prompt_tokens=stats.num_prompt_tokens - before.num_prompt_tokens,
        num_preempted_reqs=stats.num_preemptions - before.num_preemptions,
        finished_requests=[_finished(each) for each in ended],
        time_to_first_tokens_iter=[each for each in latencies if each is not None],
    )


def _finished(stream: RequestStream) -> FinishedRequestStats:
    metrics = stream.metrics
    prefill_s, decode_s = metrics.prefill_s or 0.0, metrics.decode_s or 0.0
    reason = "error" if stream.error is not None else stream.sequences[0].finish_reason or "abort"
    return FinishedRequestStats(
        finish_reason=FinishReason[reason.upper()],
        request_id=stream.request_id,
        e2e_latency=metrics.total_s or 0.0,
        num_prompt_tokens=len(stream.prompt.token_ids or ()),
        num_preemptions=metrics.num_preemptions,
        num_generation_tokens=metrics.num_generation_tokens,
        max_tokens_param=stream.params.max_tokens,
        queued_time=metrics.queued_s or 0.0,
        prefill_time=prefill_s,
        inference_time=prefill_s + decode_s,
        decode_time=decode_s,
        mean_time_per_output_token=decode_s / max(1, metrics.num_generation_tokens - 1),
        num_cached_tokens=stream.num_cached_tokens or 0,
    )
