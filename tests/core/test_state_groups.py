"""Models with recurrent layers: what rows hold, which states are kept, and that no row ever computes from a wrong one.

The null executor imitates states exactly (`executor/testing/state_check.py`): a state that is stale, of other tokens or
overwritten is an error when a step reads it.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_parts import EOS, STATE, VOCAB_SIZE, SteppedClient, SteppedCore, make_plan
from test_steady import Noting
from thinned import every, pairs

from headrace.core.options.cache_groups import longest_request, request_blocks
from headrace.core.options.memory import fit_cache, ledger
from headrace.core.options.plan import MemoryReading
from headrace.core.schedule.blocks import BlockPool
from headrace.executor.placement.multiproc import ring_layouts
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import Abort, ResetPrefixCache
from headrace.ipc.step import StateSnapshots, StepSizes, attachment_bytes

MODELS = ((None, STATE), (STATE,), (None, 9, STATE), (5, STATE))


LARGE = {"block_size": 16, "max_model_len": 2560, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
"""Options of an engine of the usual sizes."""


class TwoSteps(NullExecutor):
    max_steps_in_flight = 2
    async_by_default = True


def core_of(windows: tuple[Any, ...] = (None, STATE), model: NullModel | None = None, **changes: Any) -> SteppedCore:
    """An engine with room, whose plans are checked unless a model is given."""
    values = {"num_blocks": 400, "max_model_len": 400, "max_num_batched_tokens": 64, "windows": windows, **changes}
    return SteppedCore(model, **values)


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def answer(core: SteppedCore, client: SteppedClient, slot: int, prompt: list[int], **sampling: Any) -> int:
    """Runs one request; returns how many of its tokens were found in the cache."""
    client.add(slot, prompt, **{"max_tokens": 1, "ignore_eos": True, **sampling})
    core.run_until_idle()
    return client.cached()[slot]


# --- what is found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("pages", [1, 3])
def test_the_same_prompt_is_found_but_for_its_last_block(windows: tuple[Any, ...], pages: int) -> None:
    core = core_of(windows, state_pages=pages)
    client = core.open()
    for slot, (length, cached) in enumerate([(50, 48), (52, 48), (53, 52), (4, 0), (5, 4)]):
        assert answer(core, client, 2 * slot, text(length, length)) == 0
        assert answer(core, client, 2 * slot + 1, text(length, length)) == cached


def test_2000_prompts_that_share_369_tokens_hit_the_shared_part() -> None:
    windows = (None, STATE)
    core = core_of(windows, NullModel(vocab_size=VOCAB_SIZE), **LARGE, state_pages=20, num_blocks=9000)
    client = core.open()
    for slot in range(2000):
        client.add(slot, text(0, 369) + text(slot + 1, 30), max_tokens=1)
    core.run_until_idle()
    cached = client.cached()
    assert sum(cached.values()) >= 0.99 * 2000 * 369  # 368 are whole blocks
    assert cached[0] == 0
    assert min(cached[slot] for slot in range(1, 2000)) == 368


@pytest.mark.parametrize("at_once", every(2, [True, False]))
@pytest.mark.parametrize("windows", [(None, STATE), (STATE,), (None, 512, STATE)])
def test_the_third_prompt_that_leaves_a_known_one_starts_where_it_leaves(
    windows: tuple[Any, ...], at_once: bool
) -> None:
    """64 prompts of 1,500 shared and 700 own tokens. At once, the first keeps its state there for the others."""
    core = core_of(windows, NullModel(vocab_size=VOCAB_SIZE), **LARGE, state_pages=100, num_blocks=30_000)
    client = core.open()
    for slot in range(64):
        client.add(slot, text(0, 1500) + text(slot + 1, 700), max_tokens=1)
        if not at_once:
            core.run_until_idle()
    core.run_until_idle()
    cached = [client.cached()[slot] for slot in range(64)]
    assert cached == [0, 1488 if at_once else 0, *[1488] * 62]


def test_an_answer_and_a_preempted_row_are_gone_on_from_their_last_block() -> None:
    core = core_of(state_pages=3)
    client = core.open()
    answer(core, client, 0, text(1, 30), max_tokens=39)
    conversation = text(1, 30) + client.tokens()[0]
    assert answer(core, client, 1, conversation + text(2, 9)) == 68  # all but the last token, which was not computed
    client.add(2, text(3, 30), max_tokens=40, ignore_eos=True)
    for _ in range(20):
        core.loop.turn()
    scheduler = core.loop.scheduler
    scheduler.settle(ended=True)
    computed = int(scheduler.rows.num_computed_tokens[scheduler.rows.last_served()])
    scheduler.preempt(scheduler.rows.last_served())
    core.loop.turn()
    assert scheduler.tables.states.reach[scheduler.rows.last_served()] == computed // 4
    assert scheduler.num_cached_prompt_tokens == 68  # which counts no preempted ones
    core.run_until_idle()
    assert len(client.tokens()[2]) == 40


def test_a_long_prompt_is_kept_at_intervals_that_cost_a_tenth_of_its_blocks() -> None:
    core = core_of(state_pages=2)
    client = core.open()
    prompt = text(1, 390)
    answer(core, client, 0, prompt)
    for slot, length in enumerate([79, 81, 165, 250, 389], 1):  # 2 pages each 20 blocks of 4 tokens
        client.add(slot, [*prompt[:length], 1 + EOS], max_tokens=1)
        core.run_until_idle()
        assert client.cached()[slot] in (length // 80 * 80, length // 4 * 4)
    assert core.loop.scheduler.pool.num_cached < 1.1 * 5 * 98


def test_a_request_that_waits_for_the_state_of_another_lets_others_pass() -> None:
    core = core_of(max_num_batched_tokens=16)
    client = core.open()
    client.add(0, text(1, 300), max_tokens=1)
    core.loop.turn()
    client.add(1, text(1, 280) + text(2, 9), max_tokens=1)
    client.add(2, text(3, 5), max_tokens=1)
    core.run_until_idle()
    assert client.finishes()[0].slot == 2
    assert client.cached() == {0: 0, 1: 280, 2: 0}


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_end_of_a_block_is_kept_once_while_a_row_decodes(drafts: int) -> None:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, num_drafts=drafts)
    core = SteppedCore(model, Noting, windows=(None, STATE), max_model_len=100)
    client = core.open()
    client.add(0, text(1, 9), max_tokens=40, ignore_eos=True)
    core.run_until_idle()
    assert isinstance(core.executor, Noting)
    kept = [each for plan in core.executor.plans if (each := plan.get(StateSnapshots)) is not None]
    positions = [position for each in kept for position in each.positions.tolist()]
    skipped = set(range(8, 48, 4)) - set(positions)
    assert positions == sorted({*positions})
    assert len(skipped) <= (3 if drafts else 0)  # of several in one step the last is kept


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("executor", [NullExecutor, TwoSteps])
def test_rows_that_decode_in_a_full_pool_give_up_their_spares(executor: type[NullExecutor], pages: int) -> None:
    for num_blocks in (17, 19, 24):
        core = core_of(state_pages=pages, num_blocks=num_blocks, max_model_len=64, executor_class=executor)
        client = core.open()
        for slot in range(3):
            client.add(slot, text(slot, 5 + slot), max_tokens=50, ignore_eos=True)
        while core.loop.has_work or not core.inbox.empty():
            core.loop.turn()
            core.loop.scheduler.check()
        for slot in range(3):
            answer(core, client, 10 + slot, text(slot, 5 + slot) + client.tokens()[slot], max_tokens=2)


def test_nothing_of_a_failed_request_and_of_a_reset_cache_is_found() -> None:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, fail_token_id=7)
    core = core_of(model=model, state_pages=3)
    client = core.open()
    client.add(0, [7, *text(1, 30)])
    core.run_until_idle()
    pool = core.loop.scheduler.pool
    assert pool.num_cached == 0
    assert answer(core, client, 1, [8, *text(1, 30)], max_tokens=20) == 0
    assert pool.num_cached > 0
    pool.reset_cache()
    core.loop.scheduler.check()
    assert pool.num_available == pool.num_blocks - 1
    assert answer(core, client, 2, [8, *text(1, 30)]) == 0
    assert answer(core, client, 3, [8, *text(1, 30)]) == 28


# --- memory -----------------------------------------------------------------------------------------------------


def test_memory_counts_the_pages_of_a_state_once_for_a_request_of_any_length() -> None:
    plan, _ = make_plan(windows=(None, 64, STATE), state_pages=10, block_size=16, max_model_len=1600)
    groups = plan.model.cache_groups
    assert [group.kind for group in groups] == ["full", "sliding_window", "state"]
    assert [request_blocks(groups, length, 16) for length in (1, 16, 17, 1600)] == [12, 12, 14, 115]
    assert longest_request(groups, 115, 16, 1, 10_000) == 1600
    assert longest_request(groups[2:], 10, 16, 1, 10_000) == 10_000
    assert longest_request(groups[2:], 9, 16, 1, 10_000) == 0
    reading = MemoryReading(total_bytes=1 << 40, available_bytes=1 << 40, weights_bytes=0, activation_bytes=0)
    facts = fit_cache(plan, reading)
    assert facts.num_blocks == 1 + 7 * 115 + request_blocks(groups, 1600, 16, 32) + 2 * 8 * 10
    assert "a request's in 0 layers of one state: 10 blocks in 1 groups" in ledger(facts, plan)


def test_the_rings_have_room_for_the_snapshots_of_a_step() -> None:
    plain, _ = make_plan()
    states, _ = make_plan(windows=(None, STATE), state_pages=5)
    most = 2 * 8 + 32 // 4  # two for each row, and the ends of blocks in a step's tokens
    pages = np.arange(5 * most, dtype=np.int32)
    snapshots = StateSnapshots(rows=pages[:most], positions=pages[:most], pages=pages)
    bytes_of = [ring_layouts(plan, 1, 1)[0].slot_bytes for plan in (plain, states)]
    assert bytes_of[1] - bytes_of[0] >= len(msgspec.msgpack.encode([each.tolist() for each in (pages, pages[:most])]))
    assert attachment_bytes(StepSizes(8, 32, 8, 100, 5 * most))["StateSnapshots"] >= sum(
        each.nbytes for each in (snapshots.rows, snapshots.positions, snapshots.pages)
    )


# --- bundles ----------------------------------------------------------------------------------------------------


def test_the_blocks_of_a_bundle_go_with_its_leader() -> None:
    pool = BlockPool(11)
    pool.holders.append(Holder(held := []))
    held += pool.allocate_bundle(4)[:1]
    (leader,) = held
    pool.publish(leader, b"a")
    pool.check()
    assert pool.num_available == 6
    pool.release([held.pop()])
    assert pool.num_available == 10
    assert pool.num_unheld([leader]) == 4
    pool.acquire([leader])
    held.append(leader)
    assert (pool.num_available, pool.num_unheld([leader]), len(pool.bundle(leader))) == (6, 0, 4)
    pool.check()
    pool.release([held.pop()])
    held += pool.allocate(7)  # evicts the bundle
    assert pool.named(b"a") == 0
    assert pool.num_available == 3
    pool.check()


@pytest.mark.parametrize("fault", ["companion freed", "leader freed", "companion named", "count"])
def test_the_audit_sees_bundles_that_are_torn(fault: str) -> None:
    pool = BlockPool(11)
    pages = pool.allocate_bundle(3)
    pool.publish(pages[0], b"a")
    pool.release(pages[:1])
    pool.check()
    if fault == "companion freed":
        pool._references[pages[1]] = 0
        pool._free.append(pages[1])
    elif fault == "leader freed":
        del pool._cached[pages[0]]
        pool._free.append(pages[0])
        pool._num_cached_companions = 0
    elif fault == "companion named":
        pool.publish(pages[1], b"b")
    else:
        pool._num_cached_companions -= 1
    with pytest.raises(InconsistentError):
        pool.check()


class Holder:
    def __init__(self, held: list[int]) -> None:
        self.held = held

    def held_blocks(self) -> list[int]:
        return self.held


# --- exactness --------------------------------------------------------------------------------------------------


class Conversations:
    """Requests that begin as others did: with a shared part, with all of an earlier request, or with its answer too."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._stems = [text(seed + each, 40) for each in range(3)]
        self.prompts: list[list[int]] = []

    def next(self, answers: dict[int, list[int]]) -> list[int]:
        rng = self._random
        if self.prompts and rng.random() < 0.4:
            slot = rng.randrange(len(self.prompts))
            begin = self.prompts[slot] + answers.get(slot, [])
        else:
            begin = rng.choice(self._stems)
        begin = begin[: rng.randint(1, len(begin))] if rng.random() < 0.5 else begin
        prompt = (begin + text(rng.randrange(1000), rng.randint(0, 9)))[:60]
        self.prompts.append(prompt)
        return prompt


def play(core: SteppedCore, seed: int, num_requests: int, num_resets: int = 1) -> SteppedClient:
    """Requests arrive and are aborted at random while steps run. Everything is audited after each step."""
    rng, conversations, client = random.Random(seed), Conversations(seed), core.open()
    while len(conversations.prompts) < num_requests:
        for _ in range(rng.choice([0, 1, 1, 3])):
            slot, prompt = len(conversations.prompts), conversations.next(client.tokens())
            client.add(slot, prompt, max_tokens=rng.choice([1, 5, 40]), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.05:
            client.send(Abort(slots=(rng.randrange(len(conversations.prompts) or 1),)))
        if rng.random() < num_resets / num_requests:
            client.send(ResetPrefixCache(call=1))
        for _ in range(rng.randint(1, 8)):
            if not core.inbox.empty() or core.loop.has_work:
                core.loop.turn()
                core.loop.scheduler.check()
    core.run_until_idle()
    pool = core.loop.scheduler.pool
    assert pool.num_available == pool.num_blocks - 1
    return client


@pytest.mark.parametrize(("windows", "executor"), pairs(MODELS, (NullExecutor, TwoSteps)))
def test_no_row_computes_from_a_state_that_is_not_its_own(
    windows: tuple[Any, ...], executor: type[NullExecutor]
) -> None:
    cached = preempted = 0
    for seed, speculation in enumerate(("none", "ngram", "suffix", "rank")):
        core = random_core(windows, executor, seed, speculation)
        play(core, seed, 25)
        cached += core.loop.scheduler.num_cached_prompt_tokens
        preempted += core.loop.scheduler.num_preemptions
    assert cached > 0
    assert preempted > 0 or None not in windows


def random_core(windows: tuple[Any, ...], executor: type[NullExecutor], seed: int, speculation: str) -> SteppedCore:
    """An engine whose cache holds few requests, with limits by chance."""
    rng = random.Random(seed)
    model = NullModel(
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        check=True,
        eos_after_tokens=rng.choice([0, 3]),
        cycle_tokens=0 if speculation == "none" else 3,
        num_drafts=3 if speculation == "rank" else 0,
    )
    options: dict[str, Any] = {"num_blocks": rng.choice([17, 25, 40]), "state_pages": (3, 1, 2, 3)[seed % 4]}
    options |= {"max_num_batched_tokens": rng.choice([8, 16, 64]), "max_num_seqs": rng.choice([2, 8])}
    if speculation in ("ngram", "suffix"):
        options["speculative_config"] = {"method": speculation, "num_speculative_tokens": 4}
    return SteppedCore(model, executor, windows=windows, **options)
