"""What all engines of a pool were told to stand still for, a pause or a sleep, so that an engine that comes later is
told too: a server that was paused computes nothing, also after it was scaled or an engine was started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.frontend.client.client import CoreClient
from headrace.ipc.control import ASLEEP, Commands, PauseGeneration, ResumeGeneration, Sleep, WakeUp
from headrace.ipc.failure import EngineDeadError, HeadraceError
from headrace.ipc.messages import EngineStats

logger = logging.getLogger(__name__)

_LOOK_S = 0.1

StatsOfOthers = Callable[[], Awaitable[Sequence[EngineStats]]]


class _State(NamedTuple):
    is_paused: bool = False
    sleep_level: int = 0
    awake: frozenset[str] = frozenset()
    """The parts of a sleeping engine that were woken."""


class Standstill:
    """Hears the commands to all engines, and passes their effect on to one that joins."""

    def __init__(self) -> None:
        self._state = _State()

    def asked(self, command: object) -> None:
        """Call before a command is sent: an engine that joins meanwhile is told what is about to be."""
        match command:
            case PauseGeneration():
                self._state = self._state._replace(is_paused=True)
            case Sleep() if not self._state.sleep_level:
                self._state = self._state._replace(sleep_level=command.level, awake=frozenset())

    def done(self, command: object) -> None:
        """Call when all engines have carried out a command."""
        match command:
            case ResumeGeneration():
                self._state = self._state._replace(is_paused=False)
            case WakeUp():
                awake = self._state.awake | (set(command.tags) or ASLEEP)
                asleep = {"sleep_level": 0, "awake": frozenset()} if awake >= ASLEEP else {"awake": awake}
                self._state = self._state._replace(**asleep)

    def failed(self, command: object, error: BaseException) -> None:
        """Call when an engine has refused a command. One that has died has left it to the others."""
        if isinstance(command, Sleep) and isinstance(error, HeadraceError) and not isinstance(error, EngineDeadError):
            self._state = self._state._replace(sleep_level=0, awake=frozenset())

    async def pass_on(self, name: str, client: CoreClient, others: StatsOfOthers) -> None:
        """Brings an engine that takes no requests yet to the state of all. others: the statistics of those that serve;
        what other frontends have told them counts too. Returns at once if nothing stands still."""
        told = _State()
        while (wanted := await self._wanted(others)) != told:
            try:
                for command in _commands(told, wanted):
                    await client.control(command, None)
            except HeadraceError as error:
                if client.failure is None:
                    logger.warning("%s goes on while other engines stand still: %s", name, error)
                return
            told = wanted

    async def _wanted(self, others: StatsOfOthers) -> _State:
        while (state := self._state) != _State():
            stats = await others()
            if state != self._state:
                continue
            is_paused = all(each.paused for each in stats)
            is_asleep = all(each.sleep_level for each in stats)
            if state.sleep_level and is_paused and not is_asleep:  # they are about to sleep, or to wake up
                await asyncio.sleep(_LOOK_S)
                continue
            return state if state.sleep_level and is_asleep else _State(is_paused=state.is_paused and is_paused)
        return state


def _commands(told: _State, wanted: _State) -> list[Commands]:
    commands: list[Commands] = []
    if told.sleep_level:
        commands.append(WakeUp())
    if told.is_paused and not wanted.is_paused:
        commands.append(ResumeGeneration())
    if wanted.is_paused and not told.is_paused:
        commands.append(PauseGeneration(mode="keep", clear_cache=False))
    if wanted.sleep_level:
        commands.append(Sleep(level=2 if wanted.sleep_level == 2 else 1, mode="keep"))
    if wanted.awake:
        commands.append(WakeUp(tags=tuple(tag for tag in ("weights", "kv_cache") if tag in wanted.awake)))
    return commands
