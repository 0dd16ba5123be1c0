"""An engine that joins stands still as the others do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.frontend.fleet.standstill import Standstill
from headrace.ipc.control import PauseGeneration, ResumeGeneration, Sleep, WakeUp
from headrace.ipc.failure import EngineDeadError, HeadraceError
from headrace.ipc.messages import EngineStats


def stats(**values: Any) -> EngineStats:
    required = [field.name for field in msgspec.structs.fields(EngineStats) if field.required]
    return EngineStats(**dict.fromkeys(required, 0), **values)


RUNNING, PAUSED, ASLEEP = stats(), stats(paused=True), stats(paused=True, sleep_level=1)
PAUSE, RESUME = PauseGeneration(mode="keep", clear_cache=False), ResumeGeneration()


class Newcomer:
    """Notes the commands that an engine gets before it takes requests."""

    failure = None

    def __init__(self, after: Callable[[Any], None] = lambda command: None) -> None:
        self.commands: list[Any] = []
        self._after = after

    async def control(self, command: Any, timeout_s: float | None) -> None:
        self.commands.append(command)
        self._after(command)


def all_told(standstill: Standstill, *commands: Any) -> Standstill:
    for command in commands:
        standstill.asked(command)
        standstill.done(command)
    return standstill


def passed_on(standstill: Standstill, *looks: list[EngineStats], new: Newcomer | None = None) -> list[Any]:
    """looks: what the others say, each time that they are asked; the last one from then on."""
    new, left = new or Newcomer(), list(looks)

    async def others() -> list[EngineStats]:
        return left.pop(0) if len(left) > 1 else left[0]

    asyncio.run(standstill.pass_on("engine 7", new, others))  # type: ignore[arg-type]
    return new.commands


@pytest.mark.parametrize(
    ("commands", "others", "expected"),
    [
        ([], [PAUSED], []),
        ([PauseGeneration(mode="abort")], [PAUSED, PAUSED], [PAUSE]),
        ([PauseGeneration()], [], [PAUSE]),
        ([PauseGeneration()], [RUNNING], []),
        ([PauseGeneration(), RESUME], [RUNNING], []),
        ([Sleep(level=2)], [ASLEEP], [Sleep(level=2, mode="keep")]),
        ([Sleep(), WakeUp()], [RUNNING], []),
        ([Sleep(), WakeUp(tags=("weights",))], [ASLEEP], [Sleep(mode="keep"), WakeUp(tags=("weights",))]),
        ([Sleep(), WakeUp(tags=("weights",)), WakeUp(tags=("kv_cache",))], [RUNNING], []),
        ([PauseGeneration(), Sleep(), WakeUp()], [PAUSED], [PAUSE]),
        ([Sleep()], [RUNNING], []),
    ],
    ids=str,
)
def test_a_newcomer_gets_what_the_others_were_told_and_are(
    commands: list[Any], others: list[EngineStats], expected: list[Any]
) -> None:
    assert passed_on(all_told(Standstill(), *commands), others) == expected


def test_what_ends_while_a_newcomer_is_told_ends_for_it_too() -> None:
    standstill = all_told(Standstill(), PauseGeneration())
    new = Newcomer(lambda command: all_told(standstill, RESUME) and None)
    assert passed_on(standstill, [PAUSED], new=new) == [PAUSE, RESUME]
    standstill = all_told(Standstill(), Sleep())
    new = Newcomer(lambda command: all_told(standstill, WakeUp()) and None)
    assert passed_on(standstill, [ASLEEP], new=new) == [Sleep(mode="keep"), WakeUp()]


def test_a_newcomer_waits_for_others_that_are_about_to_sleep() -> None:
    standstill = Standstill()
    standstill.asked(Sleep(mode="wait"))
    assert passed_on(standstill, [PAUSED], [PAUSED], [ASLEEP]) == [Sleep(mode="keep")]


def test_a_sleep_that_was_refused_is_not_passed_on() -> None:
    standstill = Standstill()
    standstill.asked(Sleep())
    standstill.failed(Sleep(), HeadraceError("started without enable_sleep_mode"))
    assert passed_on(standstill, []) == []
    standstill.asked(Sleep())
    standstill.failed(Sleep(), EngineDeadError("one of them"))
    assert passed_on(standstill, [ASLEEP]) == [Sleep(mode="keep")]


def test_a_newcomer_that_cannot_sleep_is_told_of_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(command: Any) -> None:
        raise HeadraceError("no memory")

    with caplog.at_level(logging.WARNING):
        passed_on(all_told(Standstill(), Sleep()), [ASLEEP], new=Newcomer(refuse))
    assert "engine 7 goes on while other engines stand still: no memory" in caplog.text
