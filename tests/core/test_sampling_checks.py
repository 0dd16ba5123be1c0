"""Requests whose sampling parameters the workers must check: none of them empties the pipeline of the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_parts import SteppedClient, SteppedCore

from headrace.core.engine import sampling_checks
from headrace.executor.testing.null import NullExecutor
from headrace.ipc.control import CheckSampling, WorkerAnswer, WorkerCommand
from headrace.ipc.messages import Abort, Sampling

LONG = 1
"""Slot of a request that runs for long."""


class Checking(NullExecutor):
    """Refuses odd numbers of tokens, as a user's logits processor may."""

    max_steps_in_flight = 2

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[list[int]] = []

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        assert isinstance(command, CheckSampling)
        asked = [msgspec.msgpack.decode(each, type=Sampling).max_tokens for each in command.sampling]
        self.asked.append(asked)
        accepted = WorkerAnswer(rank=0, refusals=("",) * len(asked))
        return accepted, WorkerAnswer(rank=1, refusals=tuple("it is odd" if each % 2 else "" for each in asked))


def checking_core(**changes: Any) -> tuple[SteppedCore, Checking, SteppedClient]:
    core = SteppedCore(executor_class=Checking, max_model_len=512, num_blocks=600, **changes)
    core.loop.gates.register(core.loop._sampling_checks)
    assert isinstance(core.executor, Checking)
    return core, core.executor, core.open()


def failures(client: SteppedClient) -> dict[int, str]:
    return {finish.slot: finish.failure.message for finish in client.finishes() if finish.failure is not None}


def test_workers_are_asked_once_about_the_same_sampling_parameters() -> None:
    core, executor, client = checking_core()
    for slot in range(12):
        client.add(slot, [5, 6, 7 + slot], max_tokens=2 + slot % 3)
    core.run_until_idle()
    client.add(12, [5], max_tokens=3)
    core.run_until_idle()
    assert sorted(each for asked in executor.asked for each in asked) == [2, 3, 4]
    assert failures(client) == dict.fromkeys([1, 4, 7, 10, 12], "it is odd")
    assert {finish.slot for finish in client.finishes()} == set(range(13))


def start_long(core: SteppedCore, client: SteppedClient) -> None:
    client.add(LONG, [5, 6], max_tokens=200, ignore_eos=True)
    for _ in range(6):
        core.loop.turn()
    assert len(core.loop._in_flight) == 1, "a turn leaves one step in flight when it has planned the next"


def test_parameters_of_their_own_leave_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request after each step, with parameters that no other has: they wait, and are asked about together."""
    monkeypatch.setattr(sampling_checks, "PERIOD_S", 1e9)
    core, executor, client = checking_core(async_scheduling=True)
    start_long(core, client)
    for slot in range(2, 22):
        client.add(slot, [5, 6, 7], max_tokens=2 * slot)
        core.loop.turn()
        assert len(core.loop._in_flight) == 1
    assert executor.asked == [[200]]
    core.run_until_idle()
    assert executor.asked == [[200], [2 * slot for slot in range(2, 22)]]
    assert failures(client) == {}
    assert {finish.slot for finish in client.finishes()} == {LONG, *range(2, 22)}


def test_a_step_in_flight_does_not_keep_a_request_waiting_for_longer_than_the_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_checks, "PERIOD_S", 0.0)
    core, executor, client = checking_core(async_scheduling=True)
    start_long(core, client)
    client.add(2, [5, 6, 7], max_tokens=4)
    client.add(3, [5, 6, 7], max_tokens=5)
    for _ in range(8):
        core.loop.turn()
    assert executor.asked == [[200], [4, 5]]
    assert {finish.slot for finish in client.finishes()} == {2, 3}
    assert failures(client) == {3: "it is odd"}


def test_a_request_that_leaves_while_it_waits_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_checks, "PERIOD_S", 1e9)
    core, _, client = checking_core(async_scheduling=True)
    start_long(core, client)
    client.add(2, [5, 6, 7], max_tokens=4)
    core.loop.turn()
    client.send(Abort(slots=(2,)))
    core.run_until_idle()
    assert {finish.slot for finish in client.finishes()} == {LONG, 2}
    assert len(core.loop.gates) == 0
