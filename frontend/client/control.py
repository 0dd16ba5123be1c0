"""The control channel (ipc/control.py) as methods, with vLLM's names where vLLM has them.

`AsyncControls` has coroutines, for CoreClient and AsyncLLM; `Controls` has the blocking equivalents for LLM, derived
from them by `blocking`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec

from headrace.frontend.client.engine_metrics import Metric, engine_metrics
from headrace.frontend.client.one_process import OneProcess
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
from headrace.ipc.struct_types import threadsafe

if TYPE_CHECKING:
    from headrace.frontend.client.background import BackgroundLoop

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

Call = FetchTokenizer | GetStats | ResetPrefixCache | Control
"""Messages that the core answers with a Reply."""
PauseMode = Literal["abort", "wait", "keep"]
QUICK_S = 30.0
"""Time limit for calls that an engine answers promptly, after at most one long step."""


def pause_command(mode: PauseMode, clear_cache: bool) -> PauseGeneration:
    """Checks the arguments. Raises InvalidRequestError."""
    if mode not in ("abort", "wait", "keep"):
        raise InvalidRequestError(f"mode is {mode!r}; it must be abort, wait or keep")
    if not isinstance(clear_cache, bool):
        raise InvalidRequestError(f"clear_cache must be True or False, not {clear_cache!r}")
    return PauseGeneration(mode=mode, clear_cache=clear_cache)


def extension_command(payload: Mapping[str, Any]) -> CallExtension:
    """Checks the payload. Raises InvalidRequestError."""
    if not isinstance(payload, Mapping) or not all(isinstance(key, str) for key in payload):
        raise InvalidRequestError(f"the payload must be a dict with texts as keys, not {payload!r:.100}")
    return CallExtension(payload=dict(payload))


def method_command(
    method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CallExtension:
    """Checks the method's name and arguments. Raises InvalidRequestError."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if not name.isidentifier():
        raise InvalidRequestError(
            f"{method!r:.100} is no method of a worker extension (option worker_extension_cls): give its name, or the "
            "method itself. Code is not sent to workers"
        )
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping | None):
        raise InvalidRequestError(
            f"args must be a list and kwargs a dict, not {type(args).__name__} and {type(kwargs).__name__}"
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
    """Checks the arguments. Raises InvalidRequestError."""
    if level not in (1, 2):
        raise InvalidRequestError(f"level is {level!r}; it must be 1 or 2 (pause_generation stops computing alone)")
    return Sleep(level=2 if level == 2 else 1, mode=pause_command(mode, True).mode)


def wake_command(tags: Sequence[str] | None) -> WakeUp:
    """Checks the tags. Raises InvalidRequestError."""
    asked: Any = [tags] if isinstance(tags, str) else [] if tags is None else tags
    if not isinstance(asked, list | tuple) or not all(isinstance(tag, str) for tag in asked):
        raise InvalidRequestError(f"tags must be a list of texts, not {asked!r:.100}")
    if unknown := [tag for tag in asked if tag not in ASLEEP]:
        raise InvalidRequestError(f"there is no tag {unknown[0]!r}; tags are {' and '.join(sorted(ASLEEP))}")
    return WakeUp(tags=tuple(asked))


def _plain(command: Commands) -> Commands:
    """The command with values of exactly the types that its fields have. Raises InvalidRequestError."""
    values = {}
    for name, hint in typing.get_type_hints(type(command)).items():
        try:
            values[name] = msgspec.convert(getattr(command, name), threadsafe(hint))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{type(command).__name__}.{name}: {error}") from None
        try:
            msgspec.msgpack.encode(values[name])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"{type(command).__name__}.{name} cannot be sent: {error}") from None
    return type(command)(**values)


class AsyncControls(OneProcess):
    """Commands and queries that a running engine accepts besides requests.

    Every method raises HeadraceError with the engine's reason, and EngineDeadError if the engine has died.
    """

    request_counts: RequestCounts | None = None
    """Counts of the requests that this client submits; None if they are counted elsewhere."""

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Sends a message and returns the result of its Reply. Without a timeout it waits while the core lives."""
        raise NotImplementedError

    async def control(self, command: Commands, timeout_s: float | None = QUICK_S) -> Any:
        """Sends a command and returns the result that the command's docstring in ipc/control.py names.

        Raises InvalidRequestError for a command with a value of a wrong type, which the engine could not decode.
        """
        return await self.call(Control, timeout_s, command=_plain(command))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drops all cached blocks that no request uses, and returns True.

        reset_running_requests: also drop what running requests have computed; they recompute it.
        reset_connector: has no effect, as in vLLM without a connector.
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
        """Clears the cache of processed images and audio. No model of this version uses it, so it is always empty."""
        await self.control(ResetMMCache())

    async def reset_encoder_cache(self) -> None:
        """Clears the cache of encoder outputs, which is always empty too."""
        await self.control(ResetMMCache())

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops computing until `resume_generation`; new requests wait. Returns once no request is running.

        mode: current requests are aborted (`abort`), finished first (`wait`), or kept as they are (`keep`).
        clear_cache: drop the prefix cache, and what kept requests have computed. The pause outlives this client.
        """
        await self.control(pause_command(mode, clear_cache), None)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self.control(ResumeGeneration())

    async def get_stats(self) -> EngineStats:
        """The engine's load and counters."""
        stats: EngineStats = await self.call(GetStats)
        return stats

    async def stats_by_engine(self) -> dict[int, EngineStats]:
        """The load and counters of each engine, by its data_parallel_rank."""
        return {0: await self.get_stats()}

    async def get_metrics(self, prefix: str = "vllm") -> list[Metric]:
        """Metrics as vLLM's objects (Counter, Gauge, Vector, Histogram), named `prefix:name`, of each engine with its
        data_parallel_rank as the label `engine`.

        Engine metrics cover all of its clients, request metrics only the requests of this client.
        """
        welcome, counts = await self.engine(), self.request_counts
        by_engine = (await self.stats_by_engine()).items()
        return [each for engine, stats in by_engine for each in engine_metrics(stats, welcome, counts, prefix, engine)]

    async def do_log_stats(self) -> None:
        """Logs throughput, requests, cache use and hit rate since the last call, as a server does every 10 s."""
        logger.info("%s", self._stats_log.line(await self.get_stats(), time.monotonic()))

    @functools.cached_property
    def _stats_log(self) -> StatsLog:
        return StatsLog()

    async def engine(self) -> Welcome:
        """The engine's Welcome message, which describes it."""
        raise NotImplementedError

    async def is_paused(self) -> bool:
        """Whether generation is paused, or a pause was requested."""
        return (await self.get_stats()).paused

    async def reload_weights(self, weights_path: str | os.PathLike[str] | None = None) -> None:
        """Loads the weights again: the model's own, or those of another checkpoint with the same config.

        Running requests continue with the new ones; the prefix cache is cleared. Raises HeadraceError, and keeps the
        old weights, if the checkpoint is missing, of another shape, or does not fit beside the old weights. Of several
        engines all get the new weights, or none.
        """
        await self.control(ReloadWeights(path=checked_weights_path(weights_path)), None)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Records the activity of core and workers until `stop_profile`. Needs the option profiler_config.

        Raises InvalidRequestError for vLLM's delay_iterations and max_iterations, which are not supported.
        """
        if delay_iterations or max_iterations:
            raise InvalidRequestError("delay_iterations and max_iterations are refused: stop_profile ends a recording")
        await self.control(StartProfile(prefix=profile_prefix or ""), None)  # the profiler may be loaded only now

    async def stop_profile(self) -> list[str]:
        """Stops recording and returns the paths of the files, on the engine's host: open them in ui.perfetto.dev."""
        return list((await self.control(StopProfile(), None)).paths)

    async def describe_engine(self) -> EngineReport:
        """The engine's options, decisions and run-time facts, and the facts of each worker."""
        report: EngineReport = await self.control(DescribeEngine())
        return report

    async def call_extension(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of the worker extension (option worker_extension_cls) to `payload`, one per worker."""
        return list((await self.control(extension_command(payload), None)).payloads)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the worker extension (option worker_extension_cls); returns each worker's result, by rank.

        method: its name, or the method itself; arguments and results are plain data, as nothing is pickled.
        timeout: seconds; without one it waits while the engine lives.
        """
        command = method_command(method, args, kwargs)
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < math.inf):
            raise InvalidRequestError(f"timeout must be a number of seconds above 0, not {timeout!r:.100}")
        return [answer["result"] for answer in (await self.control(command, timeout)).payloads]

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses as `pause_generation` does, and frees the device's memory until `wake_up`.

        Meanwhile new requests are refused (EngineAsleepError). If the engine is already asleep nothing changes.

        level: 1 moves the weights to the host's memory, 2 drops them; the cache is dropped. On a CPU level 1 drops only
        the cache. Needs the option enable_sleep_mode. Raises HeadraceError if the host lacks the memory.
        """
        await self.control(sleep_command(level, mode), None)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the memory again and continues. tags: "weights" or "kv_cache", to wake only that part for now.

        Raises HeadraceError, and leaves asleep what was, if the memory is in use or the checkpoint is gone.
        """
        await self.control(wake_command(tags), None)

    async def is_sleeping(self) -> bool:
        """Whether the memory of weights or cache is freed."""
        return (await self.get_stats()).sleep_level > 0


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The blocking equivalent of a method, for LLM, whose client runs in another thread."""

    @functools.wraps(method)
    def call(self: Controls, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_usable()
        return self._background.run(getattr(self._client, method.__name__)(*args, **kwargs))

    return call


class Controls(OneProcess):
    """Mixed into LLM: the methods of AsyncControls, which return once the engine has replied."""

    _background: BackgroundLoop
    _client: Any  # its methods are awaited by name

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


def checked_weights_path(weights_path: str | os.PathLike[str] | None) -> str:
    """What `reload_weights` sends. Raises InvalidRequestError."""
    if not isinstance(weights_path, str | os.PathLike | None):
        raise InvalidRequestError(f"weights_path must be the path of a checkpoint, not {weights_path!r:.100}")
    return str(os.fsdecode(weights_path or ""))
