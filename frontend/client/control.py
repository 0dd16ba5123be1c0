"""The control channel (ipc/control.py) as methods, under vLLM's names where it has them.

`AsyncControls` has them to be awaited, for CoreClient and AsyncLLM; `Controls` has the same for LLM, each made by
`blocking` from the method there.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec

from headrace.frontend.client.engine_metrics import Metric, engine_metrics
from headrace.frontend.client.request_metrics import RequestCounts
from headrace.frontend.client.stats_log import StatsLog
from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    Commands,
    DescribeEngine,
    EngineReport,
    PauseGeneration,
    ReloadWeights,
    ResetMMCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Control, EngineStats, FetchTokenizer, GetStats, ResetPrefixCache, Welcome

if TYPE_CHECKING:
    from headrace.frontend.client.background import BackgroundLoop

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

Call = FetchTokenizer | GetStats | ResetPrefixCache | Control
"""Messages that the core answers with a Reply."""
PauseMode = Literal["abort", "wait", "keep"]
QUICK_S = 30.0
"""For what an engine answers at once, even when it has a long step to finish first."""


def pause_command(mode: PauseMode, clear_cache: bool) -> PauseGeneration:
    """Raises InvalidRequestError."""
    if mode not in ("abort", "wait", "keep"):
        raise InvalidRequestError(f"mode is {mode!r}; it must be abort, wait or keep")
    if not isinstance(clear_cache, bool):
        raise InvalidRequestError(f"clear_cache must be True or False, not {clear_cache!r}")
    return PauseGeneration(mode=mode, clear_cache=clear_cache)


def extension_command(payload: Mapping[str, Any]) -> CallExtension:
    """Raises InvalidRequestError."""
    if not isinstance(payload, Mapping) or not all(isinstance(key, str) for key in payload):
        raise InvalidRequestError(f"the payload must be a dict with texts as keys, not {payload!r:.100}")
    return CallExtension(payload=dict(payload))


def method_command(
    method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CallExtension:
    """Raises InvalidRequestError."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if not name.isidentifier():
        raise InvalidRequestError(
            f"{method!r:.100} is no method of a worker extension (option worker_extension_cls): give its name, or the "
            "method itself. Code is not sent to workers"
        )
    payload = {"args": list(args), "kwargs": dict(kwargs or {})}
    try:
        msgspec.msgpack.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            f"the arguments of {name} must be plain data, for nothing is pickled: {error}"
        ) from None
    return CallExtension(payload=payload, method=name)


def sleep_command(level: int, mode: PauseMode) -> Sleep:
    """Raises InvalidRequestError."""
    if level not in (1, 2):
        raise InvalidRequestError(f"level is {level!r}; it must be 1 or 2 (pause_generation stops computing alone)")
    return Sleep(level=2 if level == 2 else 1, mode=pause_command(mode, True).mode)


def wake_command(tags: Sequence[str] | None) -> WakeUp:
    """Raises InvalidRequestError."""
    asked: list[Any] = [tags] if isinstance(tags, str) else list(tags or ())
    if unknown := [tag for tag in asked if tag not in ASLEEP]:
        raise InvalidRequestError(f"there is no tag {unknown[0]!r}; tags are {' and '.join(sorted(ASLEEP))}")
    return WakeUp(tags=tuple(asked))


class AsyncControls:
    """What a running engine can be told and asked besides requests.

    Every method raises HeadraceError with the engine's reason, and EngineDeadError when the engine has died.
    """

    request_counts: RequestCounts | None = None
    """Of the requests that this client submits; None where others meter them."""

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Sends such a message, and gives its Reply's result. Without a timeout it waits while the core lives."""
        raise NotImplementedError

    async def control(self, command: Commands, timeout_s: float | None = QUICK_S) -> Any:
        """Carries out a command, and gives the result that its docstring in ipc/control.py names."""
        return await self.call(Control, timeout_s, command=command)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached block that no request is using, and says True.

        reset_running_requests: also what requests that run have computed, which is computed again.
        reset_connector: as in vLLM without a connector, there is nothing to reset by it.
        """
        if not reset_running_requests:
            await self.call(ResetPrefixCache)
            return True
        was_paused = await self.is_paused()
        await self.pause_generation("keep", clear_cache=True)
        if not was_paused:
            await self.resume_generation()
        return True

    async def reset_mm_cache(self) -> None:
        """Forgets processed images and sounds. Models of this version take none, so there is nothing to forget."""
        await self.control(ResetMMCache())

    async def reset_encoder_cache(self) -> None:
        """The same of what their encoders made of them."""
        await self.control(ResetMMCache())

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops computing until `resume_generation`; new requests wait meanwhile. Returns once nothing runs.

        mode: requests that are here `abort`, are finished first (`wait`), or are kept as they are (`keep`).
        clear_cache: forget the prefix cache, and what kept requests have computed. The pause outlives this client.
        """
        await self.control(pause_command(mode, clear_cache), None)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self.control(ResumeGeneration())

    async def get_stats(self) -> EngineStats:
        """The engine's load and counters."""
        stats: EngineStats = await self.call(GetStats)
        return stats

    async def get_metrics(self, prefix: str = "vllm") -> list[Metric]:
        """vLLM's metric objects (Counter, Gauge, Vector, Histogram), named `prefix:name`.

        The engine's are of all its clients, those of requests of this one.
        """
        return engine_metrics(await self.get_stats(), await self.engine(), self.request_counts, prefix)

    async def do_log_stats(self) -> None:
        """Logs throughput, requests, cache use and hit rate since the last time, as a server does every 10 s."""
        logger.info("%s", self._stats_log.line(await self.get_stats(), time.monotonic()))

    @functools.cached_property
    def _stats_log(self) -> StatsLog:
        return StatsLog()

    async def engine(self) -> Welcome:
        """What the engine said of itself."""
        raise NotImplementedError

    async def is_paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        return (await self.get_stats()).paused

    async def reload_weights(self, weights_path: str | None = None) -> None:
        """Reads the weights again: the model's own, or those of another checkpoint with the same config.

        Requests that run go on with the new ones; the prefix cache is forgotten. Raises HeadraceError, and leaves
        the old weights, when the checkpoint is missing, of another shape, or does not fit beside the old weights.
        """
        await self.control(ReloadWeights(path=weights_path or ""), None)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Records what core and workers do, until `stop_profile`. Needs the option profiler_config.

        Raises InvalidRequestError for a number of steps: vLLM's delay_iterations and max_iterations are not here.
        """
        if delay_iterations or max_iterations:
            raise InvalidRequestError("delay_iterations and max_iterations are refused: stop_profile ends a recording")
        await self.control(StartProfile(prefix=profile_prefix or ""))

    async def stop_profile(self) -> list[str]:
        """The files that were written, on the engine's host: for ui.perfetto.dev."""
        return list((await self.control(StopProfile(), None)).paths)

    async def describe_engine(self) -> EngineReport:
        """What was asked, decided and found, and what each worker says of itself."""
        report: EngineReport = await self.control(DescribeEngine())
        return report

    async def call_extension(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the worker extension (option worker_extension_cls) answers to `payload`, one answer of each worker."""
        return list((await self.control(extension_command(payload), None)).payloads)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a method of the worker extension (option worker_extension_cls) gives on each worker, by rank.

        method: its name, or the method itself; arguments and results are plain data, for nothing is pickled.
        timeout: seconds; without one it waits while the engine lives.
        """
        command = method_command(method, args, kwargs)
        return [answer["result"] for answer in (await self.control(command, timeout)).payloads]

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses as `pause_generation` does, and gives the device's memory back until `wake_up`.

        New requests are refused meanwhile (EngineAsleepError). An engine that sleeps already stays as it is.

        level: 1 keeps the weights in the host's memory, 2 keeps them nowhere; the cache is dropped. On a CPU level 1
        drops the cache alone. Needs the option enable_sleep_mode. Raises HeadraceError when the host has no room.
        """
        await self.control(sleep_command(level, mode), None)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again and goes on. tags: "weights" or "kv_cache", to wake only that for now.

        Raises HeadraceError, and what slept still sleeps, when the memory is taken or the checkpoint is gone.
        """
        await self.control(wake_command(tags), None)

    async def is_sleeping(self) -> bool:
        """Whether weights or cache have given their memory back."""
        return (await self.get_stats()).sleep_level > 0


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The same method for LLM, whose client runs in another thread."""

    @functools.wraps(method)
    def call(self: Controls, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_usable()
        return self._background.run(method(self._client, *args, **kwargs))

    return call


class Controls:
    """Mixed into LLM: the methods of AsyncControls, which return when the engine has answered."""

    _background: BackgroundLoop
    _client: AsyncControls

    def _check_usable(self) -> None:
        raise NotImplementedError

    reset_prefix_cache = blocking(AsyncControls.reset_prefix_cache)
    reset_mm_cache = blocking(AsyncControls.reset_mm_cache)
    reset_encoder_cache = blocking(AsyncControls.reset_encoder_cache)
    pause_generation = blocking(AsyncControls.pause_generation)
    resume_generation = blocking(AsyncControls.resume_generation)
    get_stats = blocking(AsyncControls.get_stats)
    do_log_stats = blocking(AsyncControls.do_log_stats)
    get_metrics = blocking(AsyncControls.get_metrics)
    is_paused = blocking(AsyncControls.is_paused)
    reload_weights = blocking(AsyncControls.reload_weights)
    start_profile = blocking(AsyncControls.start_profile)
    stop_profile = blocking(AsyncControls.stop_profile)
    describe_engine = blocking(AsyncControls.describe_engine)
    call_extension = blocking(AsyncControls.call_extension)
    collective_rpc = blocking(AsyncControls.collective_rpc)
    sleep = blocking(AsyncControls.sleep)
    wake_up = blocking(AsyncControls.wake_up)
    is_sleeping = blocking(AsyncControls.is_sleeping)
