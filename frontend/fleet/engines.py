"""The engines of one frontend: which are there, what they serve, and commands to all of them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import KeysView, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call, checked_weights_path
from headrace.frontend.fleet.adapters import FleetAdapters
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.lora_controls import AsyncLoRAControls
from headrace.frontend.fleet.standstill import Standstill
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.control import Commands, ExtensionAnswers, ReloadWeights
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, let_interrupts_pass
from headrace.ipc.messages import EngineStats, ExpertBalance, Welcome

_LARGEST = frozenset({"sleep_level", "max_loras"})
"""Fields that are no counts: of several engines the largest is told."""


class Engines(AsyncControls, AsyncLoRAControls):
    """A table of them. Who changes it calls `_forget_names`."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        """Sorted by index, which is the data_parallel_rank."""
        self.adapters = FleetAdapters(self)
        """Their LoRA adapters."""
        self._by_name: dict[str, Engine] = {}
        self._by_address: dict[str, Engine] = {}  # only engines that were added
        self._only: Engine | None = None
        """An only engine that does not come back: its requests go without the router."""
        self._failure: Failure | None = None
        self._last_client: CoreClient | None = None
        self._late_tokens_of_former = 0
        self._reload = asyncio.Lock()
        self._standstill = Standstill()
        self._names: list[str] | None = None  # None: outdated
        self._serving: dict[str, list[Engine]] = {}

    @property
    def names(self) -> list[str]:
        """All served models: those of connected engines first, none of engines that are gone for good."""
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> list[str]:
        there = [engine for engine in self.engines if engine.usable]
        back_soon = [engine for engine in self.engines if not engine.usable and engine.is_awaited]
        known = [*there, *back_soon] or self.engines
        return list(dict.fromkeys(name for engine in known for name in engine.names))

    @property
    def usable(self) -> bool:
        return any(engine.usable for engine in self.engines)

    @property
    def answers(self) -> bool:
        """Whether some engine is usable and not silent."""
        return any(engine.usable and not engine.is_silent for engine in self.engines)

    @property
    def addresses(self) -> KeysView[str]:
        """Addresses of the engines that were added."""
        return self._by_address.keys()

    def serving(self, model: str) -> Engine | None:
        """A usable engine of this model, preferably one that is not silent."""
        if model not in self._serving:
            self._serving[model] = [engine for engine in self.engines if model in engine.names]
        silent = None
        for engine in self._serving[model]:
            if engine.usable:
                if not engine.is_silent:
                    return engine
                silent = silent or engine
        return silent

    def _forget_names(self) -> None:
        """Call when an engine has joined, left or changed."""
        self._names = None
        self._serving.clear()

    @property
    def failure(self) -> Failure | None:
        """Why no engine is left and none will return; None while there is one, or one may return."""
        if self._failure is None and self._only is not None and self._only.client is not None:
            return self._only.client.failure
        return self._failure

    @property
    def _dead_error(self) -> HeadraceError:
        return EngineDeadError.from_failure(self.failure or Failure(message="no engine is there now"))

    @property
    def _clients(self) -> list[CoreClient]:
        """Of the engines that take requests or, without any, of those that drain. Raises EngineDeadError."""
        there = [each.client for each in self.engines if each.client is not None and each.client.failure is None]
        if not there:
            raise self._dead_error
        return [client for client in there if not client.draining] or there

    @property
    def _some_client(self) -> CoreClient:
        """The client of some engine, which may have gone. Raises EngineDeadError before the first connection."""
        if self._last_client is None or self._last_client.failure is not None:
            there = (each.client for each in self.engines if each.client is not None and each.usable)
            self._last_client = next(there, self._last_client)
        if self._last_client is None:
            raise EngineDeadError("the engines have not started")
        return self._last_client

    @property
    def welcome(self) -> Welcome:
        """Of some engine; all accept the same requests. Of the last one while none is there."""
        return self._some_client.welcome

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._some_client.tokenizer

    def check_alive(self) -> None:
        """Raises EngineDeadError if no engine accepts requests."""
        self._clients[0].check_alive()

    async def engine(self) -> Welcome:
        return self.welcome

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Calls every engine and combines the answers."""
        answers = await asyncio.gather(*(client.call(kind, timeout_s, **fields) for client in self._clients))
        return answers[0] if len(answers) == 1 else combined(answers)

    async def control(self, command: Commands, timeout_s: float | None = QUICK_S) -> Any:
        """As `call`, for a command."""
        answers = await self.control_each(command, timeout_s)
        return answers[0] if len(answers) == 1 else combined(answers)

    async def control_each(self, command: Commands, timeout_s: float | None = QUICK_S) -> list[Any]:
        """Sends every engine a command, and returns each one's answer. Engines that join later are told of a pause and
        of a sleep."""
        clients = self._clients
        self._standstill.asked(command)
        try:
            answers = await asyncio.gather(*(client.control(command, timeout_s) for client in clients))
        except BaseException as error:
            self._standstill.failed(command, error)
            raise
        self._standstill.done(command)
        return answers

    async def reload_weights(self, weights_path: str | os.PathLike[str] | None = None) -> None:
        path = checked_weights_path(weights_path)
        async with self._reload:  # engines take one after another
            there = {each.name: each.client for each in self.engines if each.client is not None and each.usable}
            if not there:
                raise self._dead_error
            await _reload_everywhere(there, path)

    async def _fleet_adapters(self) -> FleetAdapters:
        return self.adapters

    async def stats_by_engine(self) -> dict[int, EngineStats]:
        there = self._clients
        asked = {each.index: each.client for each in self.engines if each.client is not None and each.client in there}
        answers = await asyncio.gather(*(client.get_stats() for client in asked.values()))
        return dict(zip(asked, answers, strict=True))

    async def stats(self) -> dict[Engine, EngineStats]:
        """The statistics of the engines that answer in time. All are asked at once."""
        engines = list(self.engines)
        answers = await asyncio.gather(*(engine.stats() for engine in engines))
        return {engine: stats for engine, stats in zip(engines, answers, strict=True) if stats is not None}

    def num_late_tokens(self) -> int:
        """Tokens that arrived for requests after they were aborted, of all current and former engines."""
        count = self._late_tokens_of_former
        for engine in self.engines:
            count += engine.num_late_tokens()
        return count


def combined(answers: Sequence[Any]) -> Any:
    """One answer of those of several engines to a command: counts are summed, and workers' lists joined by rank, as are
    names; of other answers, which are equal, the first."""
    first = answers[0]
    if isinstance(first, EngineStats):
        return _sum(answers)
    if isinstance(first, ExtensionAnswers):
        payloads = [payload for answer in answers for payload in answer.payloads]
        return msgspec.structs.replace(first, payloads=tuple(payloads))
    return first


def _sum(values: Sequence[Any]) -> Any:
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, ExpertBalance):
        return min(values, key=lambda balance: balance.avg)  # the engine whose ranks are least balanced
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, msgspec.Struct):
        found = {name: [getattr(each, name) for each in values] for name in first.__struct_fields__}
        return type(first)(**{name: max(each) if name in _LARGEST else _sum(each) for name, each in found.items()})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: sum(each.get(key, 0) for each in values) for key in keys}
    if isinstance(first, tuple):
        if any(isinstance(each, str) for value in values for each in value):
            return tuple(dict.fromkeys(itertools.chain(*values)))
        return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))  # one that counts nothing yet has none
    return sum(values)


async def _reload_everywhere(clients: Mapping[str, CoreClient], path: str) -> None:
    """Has every engine use the weights of `path`, once all have read them. Raises HeadraceError: if one cannot read
    them, all keep the old ones; if one is lost later, with which ones serve which.

    clients: by the engine's name."""
    if len(clients) == 1:
        (only,) = clients.values()
        await only.control(ReloadWeights(path=path), None)
        return

    async def everywhere(part: Literal["prepare", "use", "forget"]) -> dict[str, BaseException]:
        command = ReloadWeights(path=path, part=part)
        answers = await asyncio.gather(
            *(client.control(command, None) for client in clients.values()), return_exceptions=True
        )
        found = {name: each for name, each in zip(clients, answers, strict=True) if isinstance(each, BaseException)}
        for each in found.values():
            let_interrupts_pass(each)
        return found

    try:
        problems = await everywhere("prepare")
    except asyncio.CancelledError:
        await everywhere("forget")
        raise
    if problems:
        await everywhere("forget")
        why = "; ".join(f"{name}: {_line(each)}" for name, each in problems.items())
        raise HeadraceError(
            f"reload_weights: {len(problems)} of {len(clients)} engines cannot use them, so all keep the old ones: "
            f"{why}"
        )
    if problems := await everywhere("use"):
        why = "; ".join(f"{name}: {_line(each)}" for name, each in problems.items())
        others = ", ".join(name for name in clients if name not in problems)
        raise HeadraceError(
            f"reload_weights: the engines serve different weights now, until it is called again: {others or 'none'} "
            f"the new ones, and not these: {why}"
        )


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
