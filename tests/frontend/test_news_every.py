"""Requests that want several tokens told at once: the first and the last without delay, each once, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedClient, SteppedCore

from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.control import PauseGeneration
from headrace.ipc.messages import Abort, Control, FinishReason


class TwoSteps(NullExecutor):
    max_steps_in_flight = 2
    async_by_default = True


def core_of(executor: type[NullExecutor] = NullExecutor, eos_after: int = 0, **changes: Any) -> SteppedCore:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, eos_after_tokens=eos_after)
    return SteppedCore(model, executor, **changes)


def counts(client: SteppedClient, slot: int) -> list[int]:
    """How many tokens of a request each message brought that brought any."""
    found = [message.slots.tolist().count(slot) for message in client.outputs()]
    return [count for count in found if count]


@pytest.mark.parametrize("executor", [NullExecutor, TwoSteps])
@pytest.mark.parametrize("company", [False, True])
def test_tokens_come_in_portions_and_are_the_same(executor: type[NullExecutor], company: bool) -> None:
    core = core_of(executor)
    client, other = core.open(), core.open()
    client.add(0, [5], max_tokens=30)
    core.run_until_idle()
    client.add(1, [5], max_tokens=30, output_interval=8)
    if company:  # which is told at every step
        other.add(0, [7, 8], max_tokens=20)
        client.add(2, [7], max_tokens=12)
    core.run_until_idle()
    tokens = client.tokens()
    assert counts(client, 1) == [1, 8, 8, 8, 5]
    assert tokens[1] == tokens[0]
    if company:
        assert counts(client, 2) == [1] * 12
        assert counts(other, 0) == [1] * 20


def test_a_step_without_news_sends_nothing() -> None:
    core = core_of()
    client = core.open()
    client.add(0, [5], max_tokens=20, output_interval=50)
    core.run_until_idle()
    assert [len(message.slots) for message in client.outputs()] == [1, 19]
    assert client.outputs()[-1].finished[0].reason == FinishReason.LENGTH


def test_an_end_by_a_token_tells_all_that_is_left() -> None:
    core = core_of(eos_after=7)
    client = core.open()
    client.add(0, [5], max_tokens=40, output_interval=50)
    core.run_until_idle()
    assert counts(client, 0) == [1, 6]
    assert client.tokens()[0][-1] == EOS


def test_a_request_that_gave_way_tells_each_token_once() -> None:
    answers = []
    for every in (1, 4):
        core = core_of(num_blocks=17)
        client = core.open()
        for slot in range(4):
            client.add(slot, [3 + slot, 4, 5, 6, 7] * 3, max_tokens=25, output_interval=every)
        core.run_until_idle()
        assert core.loop.scheduler.num_preemptions > 0
        answers.append(client.tokens())
    assert answers[0] == answers[1]


def test_what_is_cut_short_is_told_with_its_end() -> None:
    core = core_of()
    client = core.open()
    client.add(0, [5], max_tokens=50, output_interval=99)
    client.add(1, [5], max_tokens=50)
    for _ in range(10):
        core.loop.turn()
    client.send(Control(call=1, command=PauseGeneration(mode="abort")))
    core.loop.turn()
    tokens = client.tokens()
    assert len(tokens[1]) == 10
    assert tokens[0] == tokens[1]
    assert [finish.reason for finish in client.finishes()] == [FinishReason.ABORT] * 2


def test_log_probabilities_come_with_their_step() -> None:
    core = core_of()
    client = core.open()
    client.add(0, [5], max_tokens=9, output_interval=4, logprobs=1)
    core.run_until_idle()
    assert counts(client, 0) == [1] * 9


def test_less_than_one_token_at_a_time_is_refused() -> None:
    core = core_of()
    client = core.open()
    client.add(0, [5], output_interval=0)
    client.send(Abort(slots=()))
    core.run_until_idle()
    (finish,) = client.finishes()
    assert finish.failure is not None
    assert "output_interval is 0; it must lie in [1, " in finish.failure.message
