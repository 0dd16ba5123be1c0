"""The control channel as methods: what a running engine can be told and asked besides requests (ipc/control.py).

`Controls` for LLM and `AsyncControls` for AsyncLLM have the same methods under vLLM's names where it has them; an
engine in this process, one of our own and one we attached to obey alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    DescribeEngine,
    EngineReport,
    PauseGeneration,
    ReloadWeights,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from headrace.ipc.failure import HeadraceError, InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.client.background import BackgroundLoop
    from headrace.frontend.client.client import CoreClient
    from headrace.ipc.messages import EngineStats

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


def refuse_rpc() -> NoReturn:
    raise HeadraceError(
        "collective_rpc is refused: an engine calls no method by name. Use reload_weights, start_profile, "
        "describe_engine and the like, or call_extension with a class of your own (option worker_extension_cls)"
    )


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


class Controls:
    """Mixed into LLM."""

    _background: BackgroundLoop
    _client: CoreClient

    def _check_usable(self) -> None:
        raise NotImplementedError

    def _control(self, command: Any, timeout_s: float | None = QUICK_S) -> Any:
        self._check_usable()
        return self._background.run(self._client.control(command, timeout_s))

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block that no request is using."""
        self._check_usable()
        self._background.run(self._client.reset_prefix_cache())

    def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops computing until `resume_generation`; new requests wait meanwhile. Returns once nothing runs.

        mode: requests that are here `abort`, are finished first (`wait`), or are kept as they are (`keep`).
        clear_cache: forget the prefix cache, and what kept requests have computed. The pause outlives this client.
        """
        self._control(pause_command(mode, clear_cache), None)

    def resume_generation(self) -> None:
        """Ends a pause."""
        self._control(ResumeGeneration())

    def get_stats(self) -> EngineStats:
        """The engine's load and counters."""
        self._check_usable()
        return self._background.run(self._client.get_stats())

    def is_paused(self) -> bool:
        return self.get_stats().paused

    def reload_weights(self, weights_path: str | None = None) -> None:
        """Reads the weights again: the model's own, or those of another checkpoint with the same config.

        Requests that run go on with the new ones; the prefix cache is forgotten. Raises HeadraceError, and leaves
        the old weights, when the checkpoint is missing, of another shape, or does not fit beside the old weights.
        """
        self._control(ReloadWeights(path=weights_path or ""), None)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records what core and workers do, until `stop_profile`. Needs the option profiler_config."""
        self._control(StartProfile(prefix=profile_prefix or ""))

    def stop_profile(self) -> list[str]:
        """The files that were written, on the engine's host: for ui.perfetto.dev."""
        return list(self._control(StopProfile(), None).paths)

    def describe_engine(self) -> EngineReport:
        """What was asked, decided and found, and what each worker says of itself."""
        report: EngineReport = self._control(DescribeEngine())
        return report

    def call_extension(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the worker extension (option worker_extension_cls) answers to `payload`, one answer of each worker."""
        return list(self._control(extension_command(payload), None).payloads)

    def collective_rpc(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, with what to use instead."""
        refuse_rpc()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses as `pause_generation` does, and gives the device's memory back until `wake_up`.

        New requests are refused meanwhile (EngineAsleepError). An engine that sleeps already stays as it is.

        level: 1 keeps the weights in the host's memory, 2 keeps them nowhere; the cache is dropped. On a CPU level 1
        drops the cache alone. Needs the option enable_sleep_mode. Raises HeadraceError when the host has no room.
        """
        self._control(sleep_command(level, mode), None)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again and goes on. tags: "weights" or "kv_cache", to wake only that for now.

        Raises HeadraceError, and what slept still sleeps, when the memory is taken or the checkpoint is gone.
        """
        self._control(wake_command(tags), None)

    def is_sleeping(self) -> bool:
        return self.get_stats().sleeping


class AsyncControls:
    """Mixed into AsyncLLM: the same, to be awaited."""

    async def _ready(self) -> CoreClient:
        raise NotImplementedError

    async def _control(self, command: Any, timeout_s: float | None = QUICK_S) -> Any:
        return await (await self._ready()).control(command, timeout_s)

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached block that no request is using."""
        await (await self._ready()).reset_prefix_cache()

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """As LLM.pause_generation."""
        await self._control(pause_command(mode, clear_cache), None)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self._control(ResumeGeneration())

    async def get_stats(self) -> EngineStats:
        """As LLM.get_stats."""
        return await (await self._ready()).get_stats()

    async def is_paused(self) -> bool:
        return (await self.get_stats()).paused

    async def reload_weights(self, weights_path: str | None = None) -> None:
        """As LLM.reload_weights."""
        await self._control(ReloadWeights(path=weights_path or ""), None)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """As LLM.start_profile."""
        await self._control(StartProfile(prefix=profile_prefix or ""))

    async def stop_profile(self) -> list[str]:
        """As LLM.stop_profile."""
        return list((await self._control(StopProfile(), None)).paths)

    async def describe_engine(self) -> EngineReport:
        """As LLM.describe_engine."""
        report: EngineReport = await self._control(DescribeEngine())
        return report

    async def call_extension(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As LLM.call_extension."""
        return list((await self._control(extension_command(payload), None)).payloads)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, with what to use instead."""
        refuse_rpc()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """As LLM.sleep."""
        await self._control(sleep_command(level, mode), None)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As LLM.wake_up."""
        await self._control(wake_command(tags), None)

    async def is_sleeping(self) -> bool:
        """As LLM.is_sleeping."""
        return (await self.get_stats()).sleeping
