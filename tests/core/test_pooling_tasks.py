"""Requests that pool, beside requests that generate, in a core whose executor checks the plans."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.engine.loop import MESSAGES_BESIDE_STEPS
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import MOST_PROMPTS, Abort, FinishReason, Pooling, Refused, StepOutputs

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


@pytest.mark.system
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
    for slot in range(6):  # whether the request before had the same task, another one, or was refused
        client.pool(slot, [5, 6], **({} if slot in (1, 2, 5) else pool))
    core.run_until_idle()
    finishes = {finish.slot: finish for finish in client.finishes()}
    assert {slot for slot, finish in finishes.items() if finish.reason is FinishReason.STOP} == {1, 2, 5}
    for slot in (0, 3, 4):
        assert finishes[slot].reason is FinishReason.REJECTED
        assert why in finishes[slot].failure.message  # type: ignore[union-attr]


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


# --- a list of prompts in one message -------------------------------------------------------------------------------

PROMPTS = [[5], [5, 6, 7], [9] * 30, [5, 6, 7]]


def test_a_list_of_prompts_is_answered_as_each_is_alone() -> None:
    core = core_of()
    client = core.open()
    client.pool_together(7, PROMPTS)
    core.run_until_idle()
    assert client.vectors() == {7 + index: alone(prompt) for index, prompt in enumerate(PROMPTS)}
    assert [finish.reason for finish in client.finishes()] == [FinishReason.STOP] * 4


def test_each_prompt_of_a_list_is_refused_by_itself() -> None:
    core = core_of()
    client = core.open()
    client.pool(1, [5] * 20)
    client.pool_together(0, [[5], [6], [], [5, VOCAB_SIZE], [4] * 65, [7, 8], [5, 6, -1]])
    core.run_until_idle()
    assert set(client.vectors()) == {0, 1, 5}
    refused = {finish.slot: finish.failure.message for finish in client.finishes() if finish.failure is not None}
    assert set(refused) == {2, 3, 4, 6}
    assert "the prompt is empty" in refused[2]
    assert "prompt_token_ids[2] is -1" in refused[6]
    assert f"prompt_token_ids[1] is {VOCAB_SIZE}" in refused[3]
    assert "more than max_model_len" in refused[4]
    (slot_in_use,) = [each for each in client.heard if isinstance(each, Refused)]
    assert "slot 1 is in use" in slot_in_use.failure.message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_tokens": Tensor.of("int32", [1, 3, 30])}, "4 prompts have 4 ids, 3 lengths and 37 tokens"),
        ({"num_tokens": Tensor.of("int32", [1, 3, 30, 4])}, "4 lengths and 37 tokens"),
        ({"num_tokens": Tensor.of("int32", [-1, 5, 30, 3])}, "4 lengths and 37 tokens"),
        ({"num_tokens": Tensor.of("int64", [1, 3, 30, 3])}, "must be flat int32 tensors"),
        ({"prompt_token_ids": Tensor.of("float32", [0.5] * 37)}, "must be flat int32 tensors"),
        ({"request_ids": ("r",)}, "4 prompts have 1 ids"),
        ({"count": MOST_PROMPTS + 1}, f"count is {MOST_PROMPTS + 1}; it must lie in [1, {MOST_PROMPTS}]"),
    ],
)
def test_a_list_whose_parts_do_not_belong_together_ends_all_its_requests(changes: dict[str, Any], why: str) -> None:
    core = core_of()
    client = core.open()
    client.pool_together(3, PROMPTS, **changes)
    client.pool(0, [5])
    core.run_until_idle()
    refused = {each.slot: each.failure.message for each in client.finishes() if each.failure is not None}
    assert set(refused) >= {3, 4, 5, 6}
    assert all(why in each for each in refused.values())
    assert set(client.vectors()) == {0}


@pytest.mark.parametrize("fields", [{"count": 0}, {"count": -1}, {"first_slot": 2**63 - 2}, {"first_slot": 2**64 - 1}])
def test_a_list_whose_slots_no_message_can_name_disturbs_nothing(fields: dict[str, Any]) -> None:
    core = core_of()
    client = core.open()
    client.pool_together(3, PROMPTS, **fields)
    client.pool(0, [5])
    core.run_until_idle()
    assert set(client.vectors()) == {0}
    for message in client.heard:
        msgspec.msgpack.encode(message, enc_hook=lambda tensor: None)


def test_a_list_that_cannot_be_decoded_ends_all_its_requests() -> None:
    core = core_of()
    client = core.open()
    sessions = core.port._sessions
    header = msgspec.msgpack.encode(["AddPrompts", 3, 2, "no list of names"])
    assert sessions.undecodable(client.number, header, "not a message of this version") is None
    core.run_until_idle()
    assert [each.slot for each in client.finishes()] == [3, 4]
    for odd in (["AddPrompts", 3], ["AddPrompts", 3, "x"], ["AddPrompts", 2**64 - 1, 9]):
        assert isinstance(sessions.undecodable(client.number, msgspec.msgpack.encode(odd), "cut"), Refused)


def test_a_long_list_is_admitted_in_turns_and_delays_no_other_client() -> None:
    core = core_of(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=8)
    one, many = core.open(), core.open()
    one.add(0, [5], max_tokens=40)
    core.loop.turn()
    many.pool_together(0, [[5, 6, 7]] * 200)
    one.pool(1, [8])
    core.loop.turn()
    assert len(core.loop.scheduler.waiting) <= MESSAGES_BESIDE_STEPS
    while 1 not in one.vectors():
        core.loop.turn()
    assert len(many.vectors()) < 20
    core.run_until_idle()
    assert len(many.vectors()) == 200
    assert len(one.tokens()[0]) == 40


def test_a_list_that_finds_no_room_ends_what_finds_none() -> None:
    core = core_of(max_client_inbox_mb=0.02)
    client = core.open()
    client.pool_together(0, [[5]] * 100)
    core.run_until_idle()
    refused = [each.slot for each in client.finishes() if each.reason is FinishReason.REJECTED]
    assert refused
    assert sorted([*refused, *client.vectors()]) == list(range(100))
