"""Requests that pool, beside requests that generate, in a core whose executor checks the plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import Abort, FinishReason, Pooling, StepOutputs

WIDTH = 6


class Ahead(NullExecutor):
    max_steps_in_flight = 2


class Stages(NullExecutor):
    num_stages = 3
    max_steps_in_flight = 4


def core_of(fields: dict[str, Any] | None = None, **changes: Any) -> SteppedCore:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, vector_width=WIDTH, **(fields or {}))
    return SteppedCore(model, **changes)


def alone(prompt: list[int], **pool: Any) -> list[float]:
    core = core_of()
    client = core.open()
    client.pool(0, prompt, **pool)
    core.run_until_idle()
    return client.vectors()[0]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 32, 33, 63, 64])
def test_a_request_that_pools_ends_with_its_prompt_which_may_have_max_model_len_tokens(length: int) -> None:
    core = core_of()
    client = core.open()
    client.pool(0, [5] * length)
    core.run_until_idle()
    (finish,) = client.finishes()
    assert finish.reason is FinishReason.STOP
    assert client.tokens() == {}
    assert len(client.vectors()[0]) == WIDTH


def test_the_vectors_come_with_the_finish() -> None:
    core = core_of()
    client = core.open()
    client.pool(3, [5, 6, 7], dimensions=2)
    core.run_until_idle()
    (message,) = [each for each in client.heard if isinstance(each, StepOutputs) and each.finished]
    assert message.vectors is not None
    assert message.vectors.slots == Tensor.of("int32", [3])
    assert message.vectors.widths == Tensor.of("int32", [2])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_vectors_and_tokens_depend_on_nothing_else_that_runs(data: st.DataObject) -> None:
    """Chunked prompts, steps in flight, drafts, blocks that run out and prefix hits change neither."""
    drafted = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    changes: dict[str, Any] = {
        **data.draw(
            st.sampled_from([{}, {"executor_class": Ahead, "async_scheduling": True}, {"executor_class": Stages}])
        ),
        "num_blocks": data.draw(st.integers(20, 60)),
        "max_num_batched_tokens": data.draw(st.sampled_from([8, 11, 32])),
        **(drafted if data.draw(st.booleans()) else {}),
    }
    core = core_of({"cycle_tokens": 5}, **changes)
    client = core.open()
    pooled, generated = dict[int, list[int]](), dict[int, list[int]]()
    shared = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    for slot in range(data.draw(st.integers(1, 14))):
        prompt = shared[: data.draw(st.integers(0, 9))] + data.draw(
            st.lists(st.integers(3, 60), min_size=1, max_size=30)
        )
        if data.draw(st.booleans()):
            pooled[slot] = prompt
            client.pool(slot, prompt)
        else:
            generated[slot] = prompt
            client.add(slot, prompt, max_tokens=12)
        for _ in range(data.draw(st.integers(0, 3))):
            if core.loop.has_work or not core.inbox.empty():
                core.loop.turn()
    core.run_until_idle()
    assert {slot: alone(prompt) for slot, prompt in pooled.items()} == client.vectors()
    assert set(client.tokens()) == set(generated)
    assert all(len(tokens) == 12 for tokens in client.tokens().values())


def test_an_aborted_or_failed_request_brings_no_vectors_and_harms_no_other() -> None:
    core = core_of({"fail_token_id": 66}, executor_class=Ahead, async_scheduling=True)
    client = core.open()
    client.pool(0, [5] * 60)
    client.pool(1, [66, 4])
    client.pool(2, [5, 4])
    core.loop.turn()
    client.send(Abort(slots=(0,)))
    core.run_until_idle()
    reasons = {finish.slot: finish.reason for finish in client.finishes()}
    assert reasons == {0: FinishReason.ABORT, 1: FinishReason.FAILED, 2: FinishReason.STOP}
    assert set(client.vectors()) == {2}


def test_a_prefix_is_reused_but_the_last_token_is_computed() -> None:
    core = core_of()
    client = core.open()
    for slot, prompt in enumerate(([5] * 16, [5] * 16, [5] * 17)):
        client.pool(slot, prompt)
        core.run_until_idle()
    client.pool(3, [5] * 16, skip_reading_prefix_cache=True)
    core.run_until_idle()
    assert client.cached() == {0: 0, 1: 12, 2: 16, 3: 0}
    assert client.vectors()[0] == client.vectors()[1] == client.vectors()[3]


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (
            {"kinds": ("classify",)},
            "the task is to pool (classify), and this engine's tasks for null are generate, embed",
        ),
        ({"dimensions": WIDTH + 1}, f"dimensions is {WIDTH + 1}, and vectors have {WIDTH} values"),
        ({"dimensions": 0}, "dimensions"),
    ],
)
def test_what_the_model_cannot_do_is_refused_alone(pool: dict[str, Any], why: str) -> None:
    core = core_of()
    client = core.open()
    client.pool(0, [5, 6], **pool)
    client.pool(1, [5, 6])
    core.run_until_idle()
    refused, done = client.finishes()
    assert refused.reason is FinishReason.REJECTED
    assert why in refused.failure.message  # type: ignore[union-attr]
    assert done.reason is FinishReason.STOP


def test_a_prompt_longer_than_max_model_len_is_refused_alone() -> None:
    core = core_of()
    client = core.open()
    client.pool(0, [5] * 65)
    core.run_until_idle()
    (finish,) = client.finishes()
    assert "65 tokens, more than max_model_len 64" in finish.failure.message  # type: ignore[union-attr]


def test_an_engine_for_pooling_refuses_to_generate_and_the_other_way_round() -> None:
    core = core_of({"generates": False})
    client = core.open()
    client.add(0, [5, 6])
    core.run_until_idle()
    assert "runs for pooling alone" in client.finishes()[0].failure.message  # type: ignore[union-attr]
    plain = SteppedCore()
    client = plain.open()
    client.pool(0, [5, 6])
    plain.run_until_idle()
    assert "this engine's tasks for null are generate" in client.finishes()[0].failure.message  # type: ignore[union-attr]


def test_seeds_of_requests_that_generate_do_not_depend_on_those_that_pool() -> None:
    seeds = []
    for pools in (0, 3):
        core = core_of()
        client = core.open()
        for slot in range(pools):
            client.pool(slot, [5, 6])
        client.add(9, [5, 6], temperature=1.0)
        core.run_until_idle()
        seeds.append([each.seed for message in client.outputs() for each in message.admitted if each.slot == 9])
    assert seeds[0] == seeds[1]
    assert np.isfinite(seeds[0][0])


OF_TOKENS = Pooling(
    kinds=("embed", "token_embed", "token_classify"), tokens="last", width=WIDTH, widths=(WIDTH, WIDTH + 2, 1)
)
"""Vectors of tokens have other widths than those of texts."""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kinds": ("token_classify",), "columns": (WIDTH - 1,)}, "columns has 5, and vectors have 1 values"),
        (
            {"kinds": ("token_embed",), "compared_with": Tensor.from_numpy(np.ones((2, WIDTH), np.float32))},
            f"compared_with must be float32 [n, {WIDTH + 2}]",
        ),
        (
            {
                "kinds": ("token_embed",),
                "dimensions": 2,
                "compared_with": Tensor.from_numpy(np.ones((2, WIDTH + 2), np.float32)),
            },
            "compared_with must be float32 [n, 2]",
        ),
    ],
)
def test_what_is_asked_of_a_kind_is_held_to_its_own_width(asked: dict[str, Any], words: str) -> None:
    core = core_of(pooling=OF_TOKENS)
    client = core.open()
    client.pool(0, [5, 6, 7], **asked)
    core.run_until_idle()
    (finish,) = client.finishes()
    assert finish.failure is not None
    assert words in finish.failure.message
