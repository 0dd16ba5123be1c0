"""What clients order between steps, where it ends otherwise than they thought."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from test_control import Driver, ObedientNull

from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.control import CheckSampling, DescribeEngine, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import Sampling


class DeadNull(ObedientNull):
    """Its worker died, and this is how the core hears of it first."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        raise EngineDeadError("worker 0 was killed")


def test_a_command_that_finds_the_workers_dead_is_answered_and_ends_the_engine():
    driver = Driver(SteppedCore(NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS), executor_class=DeadNull))
    call = driver.send(DescribeEngine())
    with pytest.raises(EngineDeadError, match="worker 0 was killed"):
        driver.turns(2)
    reply = driver.reply(call)
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.message == "worker 0 was killed"


class Checking(NullExecutor):
    """Refuses odd numbers of tokens, as a user's logits processor may."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[Sampling] = []

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        assert isinstance(command, CheckSampling)
        sampling = msgspec.msgpack.decode(command.sampling, type=Sampling)
        self.asked.append(sampling)
        return (WorkerAnswer(refusal="it is odd" if sampling.max_tokens % 2 else ""),)


def test_workers_are_asked_once_about_the_same_sampling_parameters() -> None:
    """Asking waits for all steps in flight, so that each new request would delay those that run."""
    core = SteppedCore(executor_class=Checking)
    core.loop._checks_sampling = True
    client = core.open()
    for slot in range(12):
        client.add(slot, [5, 6, 7 + slot], max_tokens=2 + slot % 3)
    core.run_until_idle()
    assert isinstance(core.executor, Checking)
    assert sorted(each.max_tokens for each in core.executor.asked) == [2, 3, 4]
    refused = {finish.slot for finish in client.finishes() if finish.failure is not None}
    assert refused == {slot for slot in range(12) if slot % 3 == 1}
    assert all("it is odd" in str(finish.failure.message) for finish in client.finishes() if finish.failure is not None)
