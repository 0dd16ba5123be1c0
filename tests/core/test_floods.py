"""Thousands of messages at once: the core takes them a share at a time, between the steps of what runs."""

from __future__ import annotations

import queue

import pytest
from engine_parts import SteppedCore

from headrace.core.engine.loop import MESSAGES_BESIDE_STEPS
from headrace.core.engine.sessions import Inbox
from headrace.core.schedule.scheduler import ADMITTED_BESIDE_DECODES
from headrace.ipc.messages import Abort, FinishReason, GetStats, Reply, ResetPrefixCache

FLOOD = 10 * MESSAGES_BESIDE_STEPS


def test_what_runs_gets_a_token_each_step_while_thousands_of_requests_come() -> None:
    core = SteppedCore(max_num_seqs=2, async_scheduling=False)
    runs, floods = core.open(), core.open()
    runs.add(1, [5, 6], max_tokens=40, ignore_eos=True)
    core.loop.turn()
    for slot in range(FLOOD):
        floods.add(slot, [7, 8], max_tokens=1)
        floods.send(Abort(slots=(slot,)))
    taken = []
    for turn in range(10):
        before = core.inbox.qsize()
        core.loop.turn()
        taken.append(before - core.inbox.qsize())
        assert len(runs.tokens()[1]) == 2 + turn, "the request that runs has waited for others'"
    assert taken == [MESSAGES_BESIDE_STEPS] * 10
    core.run_until_idle()
    assert sorted(finish.slot for finish in floods.finishes()) == list(range(FLOOD))
    assert {finish.reason for finish in floods.finishes()} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert len(runs.tokens()[1]) == 40


def test_questions_of_one_client_do_not_keep_anothers_request_waiting() -> None:
    core = SteppedCore(async_scheduling=False)
    runs, asks = core.open(), core.open()
    runs.add(1, [5, 6], max_tokens=8, ignore_eos=True)
    core.loop.turn()
    for call in range(FLOOD):
        asks.send(GetStats(call=call))
    core.loop.turn()
    assert len(runs.tokens()[1]) == 2
    assert len(asks.heard) <= MESSAGES_BESIDE_STEPS + 1
    core.run_until_idle()
    assert len(asks.heard) >= FLOOD


def test_a_flood_of_one_client_does_not_delay_the_commands_of_another() -> None:
    core = SteppedCore(async_scheduling=False)
    runs, floods, asks = core.open(), core.open(), core.open()
    runs.add(1, [5, 6], max_tokens=8, ignore_eos=True)
    core.loop.turn()
    for slot in range(FLOOD):
        floods.add(slot, [7, 8], max_tokens=1)
        floods.send(Abort(slots=(slot,)))
    asks.send(GetStats(call=1))
    asks.send(ResetPrefixCache(call=2))
    asks.add(1, [5, 6], max_tokens=1)
    core.loop.turn()
    replies = [message.call for message in asks.heard if isinstance(message, Reply)]
    assert replies == [1, 2]
    core.loop.turn()
    assert [finish.slot for finish in asks.finishes()] == [1]
    assert core.inbox.qsize() > FLOOD, "the flood is not over"
    core.run_until_idle()


def test_messages_of_one_client_stay_in_order_and_clients_take_turns() -> None:
    inbox = Inbox()
    for slot in range(3):
        for client in (1, 2, 2, 3):
            inbox.put((client, Abort(slots=(slot,))))
    got = [inbox.get() for _ in range(12)]
    assert [client for client, _ in got] == [1, 2, 3] * 3 + [2, 2, 2]
    for client in (1, 2, 3):
        slots = [message.slots[0] for of, message in got if of == client]
        assert slots == sorted(slots)
    assert inbox.empty()
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0)


def test_an_engine_that_runs_nothing_takes_all_that_came_before_its_first_step() -> None:
    """So that one step holds as many requests as it can."""
    core = SteppedCore(max_num_seqs=4, async_scheduling=False)
    client = core.open()
    for slot in range(FLOOD):
        client.add(slot, [7, 8], max_tokens=1)
    core.loop.turn()
    assert core.inbox.empty()
    core.run_until_idle()
    assert len(client.finishes()) == FLOOD


def test_few_requests_enter_in_a_step_beside_running_ones_and_all_in_one_of_their_own() -> None:
    """To give one its row takes long enough that hundreds would keep the others' next tokens."""

    def entered(core: SteppedCore, count: int) -> int:
        client, before = core.open(), core.loop.scheduler.num_running
        for slot in range(count):
            client.add(slot, [7, 8], max_tokens=20, ignore_eos=True)
        while not core.inbox.empty() or len(core.loop.scheduler.waiting) == 0:
            core.loop._take_messages()
        core.loop.turn()
        return core.loop.scheduler.num_running - before

    many = 2 * ADMITTED_BESIDE_DECODES
    options = {"max_num_seqs": 2 * many, "max_num_batched_tokens": 2048, "num_blocks": 4096, "async_scheduling": False}
    beside = SteppedCore(**options)
    runs = beside.open()
    runs.add(1, [5, 6], max_tokens=40, ignore_eos=True)
    beside.loop.turn()
    assert entered(beside, many) == ADMITTED_BESIDE_DECODES
    assert len(runs.tokens()[1]) == 2
    beside.run_until_idle()
    assert entered(SteppedCore(**options), many) == many
