"""Several steps in flight: the same tokens as one at a time, whatever ends, waits or gives way meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from all_at_once import generate_all_at_once
from engine_histories import LIMITS, events, play
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.core.engine.sessions import ClientGone
from headrace.core.engine.statistics import StepGaps
from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import steps_in_flight
from headrace.core.schedule.policies import in_turn
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import Abort, FinishReason
from headrace.ipc.step import StepPlan, StepResult


def model(**changes: Any) -> NullModel:
    return NullModel(**{"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "check": True, **changes})


class PipelinedNull(NullExecutor):
    """Computes a step only when its result is asked for, so that plans of steps in flight see nothing of it."""

    max_steps_in_flight = 2
    async_by_default = True
    most_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        assert len(self._submitted) <= self.max_steps_in_flight, "more steps were submitted than there is room for"
        self.most_in_flight = max(self.most_in_flight, len(self._submitted))


class StagedNull(PipelinedNull):
    """As three pipeline stages do: a row may be in one step in flight only."""

    num_stages = 3
    max_steps_in_flight = 4

    def submit(self, plan: StepPlan) -> None:
        sampling: set[int] = set()
        for waiting in (*self._submitted, plan):
            sampling.difference_update(waiting.released_rows.tolist())  # such a row may be another request's by now
            if waiting is not plan:
                sampling.update(waiting.rows[waiting.sampled].tolist())
        assert not sampling & set(plan.rows.tolist()), "a row is planned before its last token is known"
        super().submit(plan)


KINDS: dict[str, type[NullExecutor]] = {"one": NullExecutor, "ahead": PipelinedNull, "stages": StagedNull}


def new_core(kind: str, null_model: NullModel | None = None, **changes: Any) -> SteppedCore:
    return SteppedCore(null_model or model(), executor_class=KINDS[kind], **changes)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["ahead", "stages"]),
    limits=st.fixed_dictionaries(LIMITS | {"scheduling_policy": st.sampled_from(["fcfs", "priority"])}),
    history=events(30, priority=st.integers(-2, 2)),
    eos_after=st.sampled_from([0, 0, 3]),
)
def test_tokens_are_those_of_one_step_at_a_time_and_every_request_ends_once(kind, limits, history, eos_after):
    """Aborted requests apart, which may have got a token more or less."""
    heard = []
    for each in ("one", kind):
        core = new_core(each, model(eos_after_tokens=eos_after), **limits)
        client, num_added, aborted = play(core, history)
        assert Counter(finish.slot for finish in client.finishes()) == Counter(range(num_added))
        assert_nothing_follows_a_finish(client)
        whole = {slot: tokens for slot, tokens in client.tokens().items() if slot not in aborted}
        reasons = {finish.slot: finish.reason for finish in client.finishes() if finish.slot not in aborted}
        heard.append((whole, reasons))
    assert heard[0] == heard[1]


def assert_nothing_follows_a_finish(client: Any) -> None:
    ended: set[int] = set()
    for message in client.outputs():
        told = {
            *message.slots.tolist(),
            *(a.slot for a in message.admitted),
            *(p.slot for p in message.prompt_logprobs),
        }
        assert not told & ended
        ended |= {finish.slot for finish in message.finished}
        if message.logprobs is not None:
            indices = message.logprob_indices.tolist()
            of_tokens = message.token_ids.numpy()[indices].tolist()
            assert message.logprobs.token_ids.numpy()[:, 0].tolist() == of_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_kept_in_flight_as_deep_as_the_executor_holds(kind):
    core = new_core(kind)
    client = core.open()
    for slot in range(8):
        client.add(slot, [3 + slot] * 4, max_tokens=12)
    core.run_until_idle()
    assert len(client.finishes()) == 8
    if kind != "one":
        executor = core.executor
        assert isinstance(executor, PipelinedNull)
        assert executor.most_in_flight == executor.max_steps_in_flight


def test_a_step_that_was_planned_ahead_for_an_ended_request_is_dropped():
    """The row of the request that ended is another's by the time the step's result comes."""
    core = new_core("ahead", model(eos_after_tokens=3), max_num_seqs=1)
    client = core.open()
    for slot in range(3):
        client.add(slot, [5 + slot] * 3, max_tokens=20)
    core.run_until_idle()
    assert {slot: len(tokens) for slot, tokens in client.tokens().items()} == {0: 3, 1: 3, 2: 3}
    assert all(tokens[-1] == EOS for tokens in client.tokens().values())
    assert [finish.reason for finish in client.finishes()] == [FinishReason.STOP] * 3


def test_no_step_is_planned_beyond_max_tokens():
    core = new_core("ahead")
    client = core.open()
    client.add(0, [5, 6, 7], max_tokens=4)
    core.run_until_idle()
    assert core.loop.stats().steps == 4  # one of the prompt, which samples the first token, and three more
    assert len(client.tokens()[0]) == 4


def test_an_aborted_request_gets_nothing_of_the_steps_in_flight():
    core = new_core("ahead")
    client = core.open()
    client.add(0, [5, 6, 7], max_tokens=20)
    client.add(1, [5, 6, 8], max_tokens=20)
    for _ in range(4):
        core.loop.turn()
    client.send(Abort(slots=(0,)))
    core.run_until_idle()
    assert_nothing_follows_a_finish(client)
    assert len(client.tokens()[1]) == 20
    assert len(client.tokens()[0]) < 20


def test_a_client_that_vanishes_leaves_no_step_behind():
    core = new_core("ahead")
    client, other = core.open(), core.open()
    client.add(0, [5, 6, 7], max_tokens=20)
    other.add(0, [5, 6, 7], max_tokens=20)
    for _ in range(3):
        core.loop.turn()
    core.inbox.put((1, ClientGone()))
    core.run_until_idle()
    assert len(other.tokens()[0]) == 20


@pytest.mark.parametrize("kind", ["ahead", "stages"])
def test_few_blocks_give_the_same_tokens(kind):
    results = []
    for each, num_blocks in (("one", 64), (kind, 17)):
        core = new_core(each, num_blocks=num_blocks)
        client = core.open()
        for slot in range(4):
            client.add(slot, [3 + slot, 4, 5, 6, 7] * 3, max_tokens=25)
        core.run_until_idle()
        results.append(client.tokens())
    assert core.loop.scheduler.num_preemptions > 0
    assert results[0] == results[1]


def test_generated_tokens_are_cached_as_soon_as_they_are_known():
    core = new_core("ahead")
    client = core.open()
    client.add(0, [5, 6, 7], max_tokens=14)
    core.run_until_idle()
    whole = [5, 6, 7, *client.tokens()[0]]
    client.add(1, whole[:16], max_tokens=1)
    core.run_until_idle()
    assert client.cached()[1] == 12  # of blocks of four: all but the one that holds the last token


def test_a_request_that_fails_while_it_is_in_another_step_fails_once():
    core = new_core("ahead", model(fail_token_id=9))
    client = core.open()
    client.add(0, [9, 9, 9], max_tokens=9)
    client.add(1, [5, 6, 7], max_tokens=9)
    core.run_until_idle()
    assert Counter((f.slot, f.reason) for f in client.finishes()) == {
        (0, FinishReason.FAILED): 1,
        (1, FinishReason.LENGTH): 1,
    }


def test_stages_take_turns_evenly():
    """Six rows and three parts: whoever waited longest is next, and rows in flight are left out."""
    import numpy as np

    pending = np.array([True, False, False, False, True, False])
    last_step = np.array([9, 3, 5, 4, 9, 1])
    assert in_turn(pending, last_step, 3).tolist() == [1, 5]


def test_how_many_steps_are_kept_in_flight():
    options = Options()
    asked, refused = Options(async_scheduling=True), Options(async_scheduling=False)
    assert steps_in_flight(options, NullExecutor(options)).depth == 1
    assert steps_in_flight(options, PipelinedNull(options)).depth == 2
    assert steps_in_flight(refused, PipelinedNull(options)).depth == 1
    staged = steps_in_flight(options, StagedNull(options))
    assert (staged.depth, staged.rows_run_ahead) == (4, False)
    assert steps_in_flight(refused, StagedNull(options)).depth == 3
    with pytest.raises(OptionError, match="async_scheduling=True cannot apply: NullExecutor holds 1 steps and needs 2"):
        steps_in_flight(asked, NullExecutor(options))


def test_the_gap_between_forward_passes_is_counted_where_work_follows_on_work():
    import numpy as np

    gaps, none = StepGaps(), np.zeros(0, np.int32)
    for step, (began_s, ended_s) in enumerate([(1.0, 2.0), (2.5, 3.0), (2.75, 4.0)]):
        gaps.step(StepResult(step=step, rows=none, token_ids=none, began_s=began_s, ended_s=ended_s))
    assert (gaps.count, gaps.gap_s, gaps.forward_s) == (2, 0.5, 2.5)
    gaps.idle()
    gaps.step(StepResult(step=3, rows=none, token_ids=none, began_s=9.0, ended_s=10.0))
    assert (gaps.count, gaps.gap_s) == (2, 0.5)
    gaps.step(StepResult(step=4, rows=none, token_ids=none))  # from an executor that does not tell
    assert (gaps.count, gaps.gap_s) == (2, 0.5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    import tiny_models

    return str(tiny_models.save("llama", tmp_path_factory.mktemp("models") / "llama"))


def answers(checkpoint: str, **options: Any) -> tuple[list[Any], int]:
    """Tokens and log-probabilities of requests, greedy, sampled, penalised and biased, with few blocks, and all
    preemptions."""
    prompts = [[5 + number % 3] * (3 + 4 * number) for number in range(6)]
    params = [
        SamplingParams(
            max_tokens=24,
            temperature=0.0 if number % 2 else 0.9,
            seed=number,
            repetition_penalty=1.2 if number == 3 else 1.0,
            logprobs=1 if number == 4 else None,
            stop_token_ids=[number * 7],
            allowed_token_ids=[*range(30, 200)] if number in (0, 5) else None,
            logit_bias={40: 2.0, 77: -100.0} if number in (1, 5) else None,
        )
        for number in range(6)
    ]
    small = {"block_size": 4, "num_gpu_blocks_override": 18, "max_model_len": 64, "max_num_batched_tokens": 16}
    common = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4}
    with LLM(checkpoint, **small, **common, **options) as llm:
        outputs = [each.outputs[0] for each in generate_all_at_once(llm, prompts, params)]
        stats = llm.get_stats()
        assert stats.num_step_gaps > 0
    return [(each.token_ids, each.finish_reason, each.stop_reason, each.logprobs is None) for each in outputs], (
        stats.num_preemptions
    )


@pytest.fixture(scope="module")
def expected(checkpoint) -> tuple[list[Any], int]:
    return answers(checkpoint, in_process=True)


def test_a_model_gives_the_same_tokens_with_and_without_planning_ahead(checkpoint, expected):
    assert expected[1] > 0, "no request gave way to another"
    assert answers(checkpoint, in_process=True, async_scheduling=True)[0] == expected[0]


@pytest.mark.parametrize(
    ("ranks", "ahead"),
    [
        ({"tensor_parallel_size": 2}, True),
        pytest.param({"pipeline_parallel_size": 2}, True, marks=pytest.mark.system),
        pytest.param({"pipeline_parallel_size": 2}, False, marks=pytest.mark.system),
    ],
)
def test_worker_processes_give_the_same_tokens_with_steps_in_flight(checkpoint, expected, monkeypatch, ranks, ahead):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert answers(checkpoint, async_scheduling=ahead, **ranks)[0] == expected[0]
