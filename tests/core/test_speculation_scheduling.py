"""Drafts change how many steps a request takes, and nothing that its client hears: with the checking null executor."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_histories import LIMITS, events, play
from engine_parts import EOS, VOCAB_SIZE, SteppedClient, SteppedCore
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_scheduling import KINDS
from thinned import every

from headrace.executor.step.verification import SampledPositions
from headrace.executor.testing.null import NullModel
from headrace.ipc.messages import FinishReason
from headrace.ipc.step import Drafts, StepPlan, StepResult

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}
METHODS = {"ngram": NGRAM, "suffix": SUFFIX}


def new_core(
    kind: str = "one", speculates: bool = True, *, token_s: float = 0.0, step_s: float = 0.0, **changes: Any
) -> SteppedCore:
    """Outputs go round in circles of five tokens, with an exception every now and then. A step takes step_s and, for
    each token beyond the first, token_s, by the clock that results tell."""
    fields = {"cycle_tokens": 5, **changes.pop("model", {})}
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, **fields)
    core = SteppedCore(
        model, executor_class=KINDS[kind], **{"speculative_config": NGRAM if speculates else {}, **changes}
    )
    plans, collect, now_s = plans_of(core), core.loop.stages.collect, 0.0

    def collect_timed() -> StepResult:
        nonlocal now_s
        result = collect()
        num_tokens = next(plan.total_tokens for plan in reversed(plans) if plan.step == result.step)
        began_s, now_s = now_s, now_s + step_s + token_s * (num_tokens - 1)
        timed: StepResult = msgspec.structs.replace(result, began_s=began_s, ended_s=now_s)
        return timed

    core.loop.stages.collect = collect_timed
    return core


def plans_of(core: SteppedCore) -> list[StepPlan]:
    """Those that it is given from now on."""
    plans: list[StepPlan] = []
    submit = core.loop.stages.submit

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    core.loop.stages.submit = noting
    return plans


REQUEST = {
    "max_tokens": st.integers(1, 40),
    "min_tokens": st.sampled_from([0, 0, 1]),
    "stop_token_ids": st.sampled_from([(), (), tuple(range(3, 12))]),
}


def logprobs_of(client: SteppedClient) -> dict[int, list[list[int]]]:
    """By slot, the tokens of each row of log-probabilities; each row begins with the token that it belongs to."""
    found: dict[int, list[list[int]]] = {}
    for message in client.outputs():
        if message.logprobs is None or message.logprob_indices is None:
            continue
        rows = message.logprobs.token_ids.numpy()
        for index, row in zip(message.logprob_indices.tolist(), rows, strict=True):
            assert message.token_ids.tolist()[index] == row[0]
            found.setdefault(message.slots.tolist()[index], []).append(row[:3].tolist())
    return found


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(["one", "one", "ahead", "stages"]),
    limits=st.fixed_dictionaries(LIMITS | {"num_blocks": st.integers(17, 60)}),
    history=events(25, most_turns=9, **REQUEST),
    eos_after=st.sampled_from([0, 0, 7]),
    method=st.sampled_from([{}, NGRAM, SUFFIX]),
    num_drafts=st.sampled_from([0, 3]),
)
def test_what_clients_hear_is_the_same_with_and_without_drafts(kind, limits, history, eos_after, method, num_drafts):
    """Aborted requests apart, which may have got a token more or less."""
    heard = []
    for speculates in (False, True):
        model = {"eos_after_tokens": eos_after, "num_drafts": num_drafts if speculates else 0}
        core = new_core(kind, model=model, **limits, speculative_config=method if speculates else {})
        client, num_added, aborted = play(core, history)
        kept = sorted(set(range(num_added)) - aborted)
        tokens, logprobs = client.tokens(), logprobs_of(client)
        ends = {finish.slot: (finish.reason, finish.stop_token) for finish in client.finishes()}
        assert len(ends) == len(client.finishes()) == num_added
        heard.append([(tokens.get(slot), logprobs.get(slot), ends[slot]) for slot in kept])
    assert heard[0] == heard[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", every(2, ["ngram", "suffix", "rank"]))
def test_a_repetitive_answer_takes_far_fewer_steps(kind: str, method: str) -> None:
    steps = {}
    for speculates in (False, True):
        config = METHODS.get(method, {}) if speculates else {}
        model = {"num_drafts": 3} if speculates and method == "rank" else {}
        core = new_core(kind, model=model, speculative_config=config, max_model_len=300, num_blocks=200)
        client = core.open()
        client.add(0, [5] * 4, max_tokens=200)
        core.run_until_idle()
        assert len(client.tokens()[0]) == 200
        steps[speculates] = core.loop.stats().steps
    assert steps[False] == 200
    assert steps[True] < 130


def test_blocks_filled_by_right_drafts_are_found_by_others_and_those_of_wrong_ones_are_not() -> None:
    """The oracle of the null executor follows the content of every block that is read."""
    core = new_core(num_blocks=200, max_model_len=200)
    client = core.open()
    client.add(0, [5] * 6, max_tokens=60)
    core.run_until_idle()
    assert 0 < core.loop._drafting.counts.num_accepted_tokens < core.loop._drafting.counts.num_draft_tokens
    answer = client.tokens()[0]
    client.add(1, [5] * 6 + answer + [9], max_tokens=1)
    core.run_until_idle()
    assert client.cached()[1] == 64  # 65 tokens were computed: the last generated one never is


@pytest.mark.parametrize("ending", ["eos", "stop token", "limit"])
def test_tokens_after_an_end_within_a_run_of_right_drafts_are_dropped(ending: str) -> None:
    for length in range(1, 20):
        core = new_core(model={"eos_after_tokens": length if ending == "eos" else 0}, max_model_len=100, num_blocks=99)
        client = core.open()
        client.add(0, [5], max_tokens=length if ending == "limit" else 60)
        core.run_until_idle()
        expected = FinishReason.STOP if ending == "eos" else FinishReason.LENGTH
        if ending == "stop token":
            answer = client.tokens()[0]
            client.add(1, [5], max_tokens=60, stop_token_ids=(answer[length],), min_tokens=length)
            core.run_until_idle()
            assert client.tokens()[1] == answer[: length + 1]
            assert (client.finishes()[1].reason, client.finishes()[1].stop_token) == (FinishReason.STOP, answer[length])
        else:
            assert len(client.tokens()[0]) == length
            assert client.finishes()[0].reason is expected


def test_a_row_whose_drafts_are_wrong_gets_few_of_them() -> None:
    """Tokens of a small vocabulary at random: a run of one token is found every time, and what follows is wrong."""
    core = new_core(model={"cycle_tokens": 0}, max_model_len=600, num_blocks=200)
    client = core.open()
    client.add(0, [5] * 4, max_tokens=500)
    core.run_until_idle()
    drafts = core.loop._drafting.counts
    assert drafts.num_draft_tokens < 40


@pytest.mark.parametrize("method", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_where_a_token_costs_as_much_as_a_step_only_sure_drafts_are_made(method: dict[str, Any]) -> None:
    drafts, heard = [], []
    for token_s in (0.0, 0.01):
        core = new_core(
            model={"cycle_tokens": 7},
            speculative_config=method,
            max_model_len=600,
            num_blocks=200,
            step_s=0.01,
            token_s=token_s,
        )
        client = core.open()
        client.add(0, [5] * 4, max_tokens=500)
        core.run_until_idle()
        counts = core.loop._drafting.counts
        drafts.append((counts.num_draft_tokens, counts.num_accepted_tokens))
        heard.append(client.tokens()[0])
    assert heard[0] == heard[1]
    (cheap, cheap_right), (dear, dear_right) = drafts
    assert dear < 0.7 * cheap
    assert dear_right / max(dear, 1) > cheap_right / cheap


def test_a_row_without_a_draft_goes_on_as_the_step_before() -> None:
    core = new_core(model={"cycle_tokens": 0}, max_model_len=600, num_blocks=200)
    plans = plans_of(core)
    client = core.open()
    client.add(0, [5] * 4, max_tokens=500)
    core.run_until_idle()
    assert sum(plan.rows is before.rows for before, plan in itertools.pairwise(plans)) > 300


def test_no_more_is_drafted_with_many_requests_and_a_step_stays_small() -> None:
    for running, config, drafts in ((3, {"disable_by_batch_size": 2}, False), (3, {"disable_by_batch_size": 3}, True)):
        core = new_core(speculative_config={**NGRAM, **config}, max_model_len=200, num_blocks=400)
        client = core.open()
        for slot in range(running):
            client.add(slot, [5, slot + 3], max_tokens=60)
        core.run_until_idle()
        assert (core.loop._drafting.counts.num_drafts > 0) == drafts
    core = new_core(max_num_seqs=40, max_num_batched_tokens=256, max_model_len=200, num_blocks=4000)
    client = core.open()
    for slot in range(40):
        client.add(slot, [5, slot + 3], max_tokens=20 + 3 * slot)
    plans = plans_of(core)
    core.run_until_idle()
    with_drafts = [plan for plan in plans if plan.get(Drafts) is not None]
    assert with_drafts
    assert all(plan.total_tokens <= 32 for plan in with_drafts)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 4)), min_size=1, max_size=5))
def test_tokens_count_as_far_as_drafts_are_right_and_something_could_be_sampled(rows) -> None:
    """Each row: its drafts, and how many of those the sampled tokens agree with."""
    drafts = [token for row, _ in rows for token in row]
    sampled, expected = [], []
    for row, right in rows:
        right = min(right, len(row))
        sampled += [*row[:right], 9, *[0] * (len(row) - right)]
        expected.append(right + 1)
    plan = StepPlan(
        step=0,
        released_rows=np.zeros(0, np.int32),
        new_rows=(),
        block_tables=np.zeros(0, np.int32),
        block_ids=np.zeros(0, np.int32),
        rows=np.arange(len(rows), dtype=np.int32),
        num_tokens=np.array([len(row) + 1 for row, _ in rows], np.int32),
        num_computed_tokens=np.zeros(len(rows), np.int32),
        sampled=np.ones(len(rows), bool),
        total_tokens=len(sampled),
    )
    counts = np.array([len(row) for row, _ in rows], np.int32)
    places = SampledPositions(plan, Drafts(counts=counts, token_ids=np.array(drafts, np.int32)))
    assert places.counts(np.array(sampled)).tolist() == expected
    for bad in range(len(sampled)):
        unusable = np.arange(len(sampled)) == bad
        found = places.counts(np.array(sampled), unusable).tolist()
        owner = int(np.searchsorted(np.cumsum(places.num_positions), bad, "right"))
        wanted = list(expected)
        wanted[owner] = min(wanted[owner], bad - int(places.starts[owner]))
        assert found == wanted
