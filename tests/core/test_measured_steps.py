"""Metrics of KV blocks and of utilisation: by hand-made histories, and of an engine that runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from null_with_tokenizer import BACKEND, VOCAB_SIZE

from headrace import LLM, SamplingParams
from headrace.core.engine.step_work import pairs, weights_read
from headrace.core.options.plan import StepWork
from headrace.core.schedule.block_residency import BlockResidency
from headrace.core.schedule.blocks import BlockPool
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import BLOCK_TIME_BOUNDS, Counted

NULL: Any = {"distributed_executor_backend": BACKEND, "hf_overrides": {"vocab_size": VOCAB_SIZE}}
TOKEN, OUTPUT, PAIR = 1000.0, 100.0, 10.0  # operations of the null executor's model


def num(counted: Counted) -> int:
    return sum(counted.counts)


def test_the_times_of_a_block_are_counted_when_it_is_evicted() -> None:
    now_s = 0.0
    pool = BlockPool(3)
    pool.residency = BlockResidency(1.0, clock=lambda: now_s)
    kept, other = pool.allocate(1), pool.allocate(1)
    pool.publish(kept[0], b"kept")
    pool.release(kept)
    pool.release(other)  # without a name: it is free, and no eviction
    for at_s in (2.0, 5.0, 9.0):
        now_s = at_s
        pool.acquire(kept)
        pool.release(kept)
    now_s = 29.0
    assert num(pool.residency.times().lifetime) == 0
    pool.allocate(2)
    times = pool.residency.times()
    assert (times.lifetime.sum, times.idle_before_evict.sum, times.reuse_gap.sum) == (29.0, 20.0, 7.0)
    assert [num(each) for each in (times.lifetime, times.idle_before_evict, times.reuse_gap)] == [1, 1, 2]
    assert times.lifetime.counts[BLOCK_TIME_BOUNDS.index(30.0)] == 1
    assert times.idle_before_evict.counts[BLOCK_TIME_BOUNDS.index(20.0)] == 1


def test_a_block_that_is_forgotten_by_command_is_not_counted() -> None:
    pool = BlockPool(2)
    pool.residency = BlockResidency(1.0)
    block = pool.allocate(1)
    pool.publish(block[0], b"name")
    pool.release(block)
    pool.reset_cache()
    pool.allocate(1)
    assert num(pool.residency.times().lifetime) == 0


def test_a_share_of_the_blocks_is_followed() -> None:
    pool = BlockPool(1001)
    pool.residency = BlockResidency(0.2)
    for turn in range(2):
        blocks = pool.allocate(1000)
        for block in blocks:
            pool.publish(block, f"{turn} {block}".encode())
        pool.release(blocks)
    pool.allocate(1000)
    assert 300 < num(pool.residency.times().lifetime) < 500  # of 2,000; 8 standard deviations


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_pairs_are_those_that_attention_computes(window: int | None) -> None:
    rows = list(itertools.product((1, 2, 5, 9), (0, 1, 2, 3, 6, 20)))
    expected = sum(min(before + i, window or before + i) for new, before in rows for i in range(1, new + 1))
    new, before = np.array(rows, np.int64).T
    assert pairs(new, before, window) == expected


def test_experts_that_nobody_chose_are_not_read() -> None:
    work = StepWork(token_flops=0, output_flops=0, attention=(), expert_share=0.8, chosen_share=0.25)
    assert weights_read(work, 1) == pytest.approx(0.2 + 0.8 * 0.25)
    assert weights_read(work, 1000) == pytest.approx(1.0)


def metrics_of(llm: LLM) -> dict[str, Any]:
    return {each.name.removeprefix("vllm:"): each for each in llm.get_metrics()}


def test_an_engine_tells_of_its_work_and_its_blocks() -> None:
    options: Any = {"enable_mfu_metrics": True, "kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0}
    with LLM("null", in_process=True, num_gpu_blocks_override=12, max_model_len=64, **NULL, **options) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        llm.generate({"prompt_token_ids": [5] * 10}, params, use_tqdm=False)
        # 12 tokens are computed: the last one is nobody's context.
        flops = 12 * TOKEN + 3 * OUTPUT + 12 * 13 / 2 * PAIR
        assert metrics_of(llm)["estimated_flops_per_gpu"].value == flops
        for first in range(10, 20):
            llm.generate({"prompt_token_ids": [first] * 40}, params, use_tqdm=False)
        found = metrics_of(llm)
    written, read = (found[f"estimated_{kind}_bytes_per_gpu"].value for kind in ("write", "read"))
    assert 0 < written < read
    lifetime = found["kv_block_lifetime_seconds"]
    assert lifetime.count == lifetime.buckets["+Inf"] >= 9, "20 blocks were named, of which 11 stay"
    assert found["kv_block_idle_before_evict_seconds"].sum <= lifetime.sum


def test_without_the_options_nothing_is_measured() -> None:
    with LLM("null", in_process=True, **NULL) as llm:
        assert not [name for name in metrics_of(llm) if name.startswith(("kv_block_", "estimated_"))]


def test_a_share_outside_its_range_is_refused() -> None:
    with pytest.raises(OptionError, match="kv_cache_metrics_sample"):
        LLM("null", in_process=True, kv_cache_metrics_sample=0.0, **NULL)
