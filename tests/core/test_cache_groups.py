"""Cache groups: how layers are put into groups, what a row holds in each, and what the prefix cache finds for all."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_models
import torch
from all_at_once import generate_all_at_once
from engine_parts import STATE, WINDOWS, SteppedCore, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_end_to_end import prompts_of, reference, tokens_of
from test_models import reference_logits
from thinned import pairs

from headrace import LLM, SamplingParams
from headrace.core.options.cache_groups import CacheGroup, group_layers, longest_request, request_blocks
from headrace.core.options.memory import block_bytes, fit_cache, ledger, requests_at_once
from headrace.core.options.plan import MemoryReading, Plan
from headrace.core.schedule.block_tables import BlockTables
from headrace.core.schedule.blocks import NULL_BLOCK, BlockPool
from headrace.core.schedule.groups.group import PrefixHit
from headrace.core.schedule.requests import Request
from headrace.core.schedule.scheduler import Scheduler
from headrace.executor.cpu import rank as cpu_rank
from headrace.executor.models import kv_cache
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import cache_groups
from headrace.ipc.failure import InconsistentError, OptionError
from headrace.ipc.prefix_names import PrefixKey

GEMMA3 = (1024,) * 5 + (None,)  # windows of six layers after each other


def gemma3_plan(windows: tuple[int | None, ...], **options: Any) -> Plan:
    """48 layers of 8 key/value heads of 256 elements, as Gemma 3 12B has them, at a context of 32768 tokens."""
    plan, _ = make_plan(block_size=16, max_num_batched_tokens=2048, max_model_len=32768, **options)
    groups = group_layers(windows * 8)
    rows = 2 * 8 * max(len(group.layers) for group in groups)
    model = msgspec.structs.replace(
        plan.model, num_layers=48, cache_groups=groups, kv_rows_per_token=rows, kv_elements_per_token=rows * 256
    )
    return msgspec.structs.replace(plan, model=model, max_num_seqs=256, max_model_len_is_fixed=True)


# --- groups -----------------------------------------------------------------------------------------------------


def test_groups_have_as_many_layers_as_the_rarest_kind_and_full_attention_comes_first() -> None:
    groups = group_layers(GEMMA3 * 2 + (1024, 1024))  # as Gemma 3 1B ends
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        ("full", 0, (5, 11)),
        ("sliding_window", 1024, (0, 7)),
        ("sliding_window", 1024, (1, 8)),
        ("sliding_window", 1024, (2, 9)),
        ("sliding_window", 1024, (3, 10)),
        ("sliding_window", 1024, (4, 12)),
        ("sliding_window", 1024, (6, 13)),
    ]
    assert group_layers([None] * 5) == (CacheGroup(layers=(0, 1, 2, 3, 4)),)
    assert [group.layers for group in group_layers([8, None] * 3 + [8])] == [(1, 3, 5), (0, 2, 4, 6)]


@given(st.lists(st.sampled_from([None, None, 3, 7]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_of_its_kind(windows: list[int | None]) -> None:
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window or None}
    sizes = [len(group.layers) for group in groups]
    waste = len(groups) * max(sizes) - len(windows)
    assert waste < len(windows) / 2 or len(set(windows)) > 1


@given(st.sampled_from(WINDOWS), st.integers(1, 300), st.integers(1, 17), st.integers(1, 40), st.integers(1, 500))
def test_the_longest_request_is_the_longest_that_fits(windows, num_blocks, block_size, step_tokens, most) -> None:
    groups = group_layers(windows)
    found = longest_request(groups, num_blocks, block_size, step_tokens, most)
    fits = [n for n in range(1, most + 1) if request_blocks(groups, n, block_size, step_tokens) <= num_blocks]
    assert found == max(fits, default=0)
    assert len(fits) == found  # all shorter ones fit too


# --- what a row holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None, 9, 9, 9), (5,), (1,), (16, None)])
@pytest.mark.parametrize("step_tokens", [1, 7, 32])
def test_a_row_holds_its_window_and_a_block_and_what_a_step_needs(windows, step_tokens) -> None:
    core = SteppedCore(windows=windows, max_num_batched_tokens=step_tokens, max_num_seqs=1, max_model_len=200)
    client = core.open()
    client.add(0, [3 + i % 5 for i in range(120)], max_tokens=60, ignore_eos=True)
    tables, most = core.loop.scheduler.tables, Counter[int]()
    while not core.inbox.empty() or core.loop.has_work:
        core.loop.turn()
        core.loop.scheduler.check()
        core.loop.scheduler.settle()
        computed = int(core.loop.scheduler.rows.num_computed_tokens[0])
        for number, group in enumerate(tables.groups):
            held = int((tables.table[number, 0] != NULL_BLOCK).sum()) if tables.num_blocks[0] else 0
            tokens_at_once = 1 if computed > 120 else step_tokens
            assert held <= group.num_blocks(computed, tables.block_size, tokens_at_once)
            most[group.window] = max(most[group.window], held)
    assert client.finishes()[0].slot == 0
    for window in {group.window for group in tables.groups} - {0}:
        assert most[window] <= -(-(window + step_tokens) // tables.block_size) + 1


def test_what_a_window_gives_back_serves_other_requests_and_other_groups() -> None:
    """With as many blocks as the longest request holds at once, all of its tokens are computed."""
    core = SteppedCore(windows=(None, 9), num_blocks=17, max_num_batched_tokens=8)
    assert core.loop.scheduler.pool.num_blocks < 1 + 2 * 16
    client = core.open()
    client.add(0, [3, 4, 5], max_tokens=61, ignore_eos=True)
    core.run_until_idle()
    assert len(client.tokens()[0]) == 61


# --- the prefix cache -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(WINDOWS), st.data())
def test_a_hit_is_the_longest_that_every_group_has(windows, data) -> None:
    block_size, num_hashes, groups = 4, data.draw(st.integers(0, 8)), group_layers(windows)
    pool = BlockPool(100)
    tables = BlockTables(pool, 1, 64, block_size, groups)
    hashes = [b"%d" % index for index in range(num_hashes)]
    stored = data.draw(st.lists(st.lists(st.booleans(), min_size=num_hashes, max_size=num_hashes),
                                min_size=len(groups), max_size=len(groups)))  # fmt: skip
    blocks: dict[tuple[int, int], int] = {}
    for group, present in enumerate(stored):
        for index in np.flatnonzero(present).tolist():
            (block,) = pool.allocate(1)
            pool.publish(block, tables.name(hashes[index], group))
            pool.release([block])
            blocks[group, index] = block

    def needed(group: int, length: int) -> list[int]:
        first = groups[group].first_read(length * block_size) if length else 0
        return list(range(first // block_size, length))

    lengths = [
        length
        for length in range(num_hashes + 1)
        if all((group, index) in blocks for group in range(len(groups)) for index in needed(group, length))
    ]
    hit = tables.find(hashes)
    assert hit.num_blocks == max(lengths)
    for group, found in enumerate(hit.blocks):
        assert found == [blocks[group, index] for index in needed(group, hit.num_blocks)]
    tables.enter(0, hit)
    pool.check()
    tables.release(0)
    pool.check()


def test_a_repeated_prompt_is_found_though_windows_gave_its_blocks_back() -> None:
    core = SteppedCore(windows=(None, 6, 6), num_blocks=200, max_num_batched_tokens=8, max_num_seqs=2)
    client = core.open()
    prompt = [3 + i % 7 for i in range(50)]
    client.add(0, prompt, max_tokens=1)
    core.run_until_idle()
    client.add(1, prompt, max_tokens=5)
    core.run_until_idle()
    assert client.cached()[1] == 48
    hashes: list[bytes] = []
    key = PrefixKey(weights=core.loop._admission._version_of_weights)
    core.loop.scheduler.hasher.extend(hashes, key, np.array(prompt[:48], np.int32), 12)
    hit = core.loop.scheduler.tables.find(hashes)
    assert [len(blocks) for blocks in hit.blocks] == [12, 2, 2]


# --- observers and holders --------------------------------------------------------------------------------------


def test_observers_hear_what_is_stored_and_evicted() -> None:
    core = SteppedCore(windows=(None, 6), num_blocks=17, max_num_batched_tokens=8)
    pool, found, events = core.loop.scheduler.pool, dict[bytes, int](), list[str]()

    class Mirror:
        def stored(self, block: int, name: bytes) -> None:
            assert name not in found
            found[name] = block
            events.append("stored")

        def evicted(self, block: int, name: bytes) -> None:
            assert found.pop(name) == block
            events.append("evicted")

    pool.observers.append(Mirror())
    client = core.open()
    for slot in range(8):
        client.add(slot, [3 + slot] * 20, max_tokens=10, ignore_eos=True)
    core.run_until_idle()
    assert all(pool.named(name) == block for name, block in found.items())
    assert len(found) == pool.num_cached == events.count("stored") - events.count("evicted")
    assert "evicted" in events
    pool.reset_cache()
    assert not found


def test_the_audit_counts_what_other_holders_than_rows_hold() -> None:
    core = SteppedCore()
    pool = core.loop.scheduler.pool
    held = pool.allocate(2)
    with pytest.raises(InconsistentError, match="differ from what is held"):
        core.loop.scheduler.check()

    class Transfer:
        def held_blocks(self) -> list[int]:
            return held

    pool.holders.append(Transfer())
    core.loop.scheduler.check()


# --- memory -----------------------------------------------------------------------------------------------------


def test_gemma_3s_shape_holds_five_times_the_tokens_at_32k() -> None:
    """48 layers with a window of 1024, every sixth full, in 24 GiB: exact numbers of both layouts."""
    reading = MemoryReading(
        total_bytes=80 << 30, available_bytes=80 << 30, weights_bytes=0, activation_bytes=0, device="a GPU"
    )
    capacity = {}
    for name, windows in (("groups", GEMMA3), ("one", (None,) * 6)):
        plan = gemma3_plan(windows)
        plan = msgspec.structs.replace(
            plan, options=msgspec.structs.replace(plan.options, kv_cache_memory_bytes=24 << 30)
        )
        facts = fit_cache(plan, reading)
        capacity[name] = requests_at_once(facts.num_blocks, facts.max_model_len, plan) * facts.max_model_len
        assert facts.num_blocks == (24 << 30) // block_bytes(plan)
        if name == "groups":
            text = ledger(facts, plan)
    assert int(capacity["one"]) == 65_520  # 2 requests less the null block
    assert int(capacity["groups"]) == 330_510  # five times as many
    assert "of it, a request's in 40 layers of a window of 1024 tokens: 325 blocks in 5 groups" in text
    assert "in 8 layers of all tokens: 2048 blocks in 1 groups" in text


def test_the_longest_request_needs_only_the_windows() -> None:
    """In memory for 8192 tokens of one group, Gemma 3's groups hold a request of 32768."""
    reading = MemoryReading(
        total_bytes=80 << 30, available_bytes=80 << 30, weights_bytes=0, activation_bytes=0, device="a GPU"
    )
    size = 513 * block_bytes(gemma3_plan((None,) * 6))
    with pytest.raises(OptionError, match="enough for 8192 tokens; lower max_model_len to 8192"):
        fit_cache(gemma3_plan((None,) * 6, kv_cache_memory_bytes=size), reading)
    assert fit_cache(gemma3_plan(GEMMA3, kv_cache_memory_bytes=size), reading).max_model_len == 32768


# --- models -----------------------------------------------------------------------------------------------------

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "in_process": True,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 480,
    "max_num_batched_tokens": 32,
}
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> str:
    return str(tiny_models.save(name, folder / name))


def expect_greedy(name: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_logits(reference(name), prompt, answer).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "computed_as"), pairs(("gemma3", "gemma2", "mistral_window"), ("program", "op by op"))
)
def test_a_long_request_is_answered_in_a_cache_that_could_not_hold_all_of_it(folder, name, computed_as, monkeypatch):
    """Greedy tokens are those of transformers, past many windows, cold and with a prefix found in the cache."""
    if computed_as == "op by op":
        monkeypatch.setattr(cpu_rank, "why_not", lambda spec, dtype, place: "the test says so.")
    model = saved(folder, name)
    spec = spec_from_config(json.loads(Path(model, "config.json").read_text()))
    groups = cache_groups(spec)
    blocks = 1 + request_blocks(groups, 480, 8, step_tokens=32)
    memory = blocks * kv_cache.block_bytes(spec, 8, torch.float32, groups=groups)
    with pytest.raises(OptionError, match="one request of max_model_len=480 tokens needs"):
        LLM(model, **ENGINE, kv_cache_memory_bytes=memory, disable_hybrid_kv_cache_manager=True)
    prompts = prompts_of((400, 30, 100))
    prompts.append(prompts[0][:64] + prompts[1])  # of which a prefix may be found
    with LLM(model, **ENGINE, kv_cache_memory_bytes=memory) as llm:
        cold = tokens_of(llm.generate(prompts[:1], LONG, use_tqdm=False))
        assert llm.get_stats().num_blocks == blocks - 1
        outputs = llm.generate([prompts[0] + cold[0][:-1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert tokens_of(outputs)[0] == cold[0][-1:]
        assert outputs[0].num_cached_tokens == 456  # all but the last token's block, though windows gave most back
        many = tokens_of(generate_all_at_once(llm, prompts, LONG))
    assert many[0] == cold[0]
    expect_greedy(name, prompts, many)


@pytest.mark.parametrize("begins", ["alike", "otherwise"])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 9, 3), (None, STATE), (None, 6, STATE)])
def test_a_request_that_waits_for_blocks_is_not_looked_up_in_every_step(
    windows: tuple[int | None, ...], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if it begins as a running one does, of which windows have given back what a hit would need."""
    core = SteppedCore(windows=windows, num_blocks=17, max_num_batched_tokens=64, async_scheduling=False)
    scheduler, looked_up = core.loop.scheduler, list[int]()
    look_up = type(scheduler)._look_up

    def noting(self: Scheduler, request: Request) -> PrefixHit:
        looked_up.append(request.slot)
        return look_up(self, request)

    monkeypatch.setattr(type(scheduler), "_look_up", noting)
    client = core.open()
    client.add(0, [3] * 30, max_tokens=30, ignore_eos=True)
    core.loop.turn()
    client.add(1, [3] * (20 if begins == "alike" else 0) + [4] * 40, max_tokens=20)
    for _ in range(20):
        core.loop.turn()
    assert not any(finish.slot == 0 for finish in client.finishes()), "the first ends too soon to tell"
    assert 1 <= looked_up.count(1) <= 2, "what the other fills is none of its blocks"
    core.run_until_idle()
    assert sorted(finish.slot for finish in client.finishes()) == [0, 1]
