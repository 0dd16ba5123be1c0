"""What clients order between steps, where it ends otherwise than they thought."""

from __future__ import annotations

import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from test_control import Driver, ObedientNull

from headrace.executor.testing.null import NullModel
from headrace.ipc.control import DescribeEngine, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError


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
