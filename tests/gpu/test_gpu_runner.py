"""The GPU runner on the CPU: the tokens of the CPU's runner, with steps in flight, through graphs and without."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gpu_parts import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_ROWS,
    POISON,
    VOCAB_SIZE,
    LateDevice,
    TensorHashModel,
    new_cache,
)
from graph_recorder import RecordingCapturer
from plan_maker import PlanMaker
from thinned import every

from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.gpu.device_state import HostDevice
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.steps import LogprobsInFlight
from headrace.executor.sampling.columns import Needs
from headrace.executor.sampling.draws import Draws
from headrace.executor.step.batch import BatchState, StepArrays
from headrace.executor.step.inputs import StepInputs, StepLogits, step_in_two
from headrace.ipc.step import Drafts, StepPlan, StepResult, TokenMasks

LIMITS = RunnerLimits(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, eos_token_ids=(3,), capture_sizes=(1, 2, 4, 6))
PAIRS = ((7,), *((first, second) for first in range(0, VOCAB_SIZE, 2) for second in range(0, VOCAB_SIZE, 3)))
"""A third of what may follow half of the tokens, so that hardly a step goes by without a word to complete."""
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "logprob_token_ids": (7, 3, 9)},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (4, 5, 6)},
    {"temperature": 0.7, "top_k": 3, "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3)), "logprobs": 12},
    {"temperature": 0.0, "logit_bias": {2: 3.0, 7: -np.inf, 9: 4.0}, "presence_penalty": 0.5},
    {"temperature": 1.1, "bad_words": PAIRS, "logit_bias": {7: 2.0, 8: 2.5}},
    {"temperature": 1.2, "typical_p": 0.7, "xtc_probability": 0.6, "xtc_threshold": 0.02, "dry_multiplier": 2.0},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(20)), "bad_words": PAIRS, "repetition_penalty": 0.8},
)


class HostModel(TensorHashModel):
    def step(self, arrays: StepArrays, kv_cache: torch.Tensor, draws: Draws | None) -> StepLogits:
        return step_in_two(self, StepInputs.on(torch.device("cpu"), arrays), kv_cache)


class Twins:
    """Feeds the same plans to the CPU's runner and, `ahead` steps before their results are read, to the GPU's."""

    def __init__(
        self,
        ahead: int = 2,
        capturer: RecordingCapturer | None = None,
        device: HostDevice | None = None,
        masks: np.random.Generator | None = None,
    ):
        """masks: draws which of a step's places have one, and the tokens that it allows."""
        self._masks = masks
        self.maker = PlanMaker(block_size=BLOCK_SIZE)
        batch = BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, (3,))
        self.reference = ModelRunner(HostModel(), new_cache(), batch, vocab_size=VOCAB_SIZE)
        self.cache = new_cache()
        self.runner = GpuRunner(TensorHashModel(), self.cache, device or HostDevice(), LIMITS, capturer)
        self._ahead = ahead
        self._expected: deque[StepResult] = deque()
        self._ended_s = 0.0

    def step(self, *work: int | tuple[Any, ...]) -> StepResult:
        for item in work:
            self.maker.compute(*(item if isinstance(item, tuple) else (item,)))
        plan = self.maker.plan()
        if self._masks is not None:
            plan = with_masks(plan, self._masks)
        self.runner.submit(plan)
        result = self.reference.step(plan)
        self.maker.sampled(result.rows, result.token_ids, result.counts)
        self._expected.append(result)
        if len(self._expected) == self._ahead:
            self.compare()
        return result

    def compare(self) -> None:
        expected, found = self._expected.popleft(), self.runner.collect()
        same(found, expected)
        if found.ended_s:
            assert max(self._ended_s, found.began_s) <= found.ended_s <= time.monotonic()
            self._ended_s = found.ended_s
        assert bool(found.ended_s) == bool(expected.ended_s), "steps that compute nothing have no time"

    def drain(self) -> None:
        while self._expected:
            self.compare()


def with_masks(plan: StepPlan, dice: np.random.Generator) -> StepPlan:
    """Allows about half of the tokens at about half of the places."""
    num_positions = np.ones(int(plan.sampled.sum()), int)
    if (drafts := plan.get(Drafts)) is not None:
        num_positions += drafts.counts[plan.sampled]
    places = np.flatnonzero(dice.random(num_positions.sum()) < 0.5).astype(np.int32)
    if not len(places):
        return plan
    words = dice.integers(-(2**31), 2**31, (len(places), -(-VOCAB_SIZE // 32)), np.int32)
    masks = TokenMasks(positions=places, words=(words | 1).reshape(-1))
    return msgspec.structs.replace(plan, attachments=(*plan.attachments, masks))


def same(found: StepResult, expected: StepResult) -> None:
    assert found.step == expected.step
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.counts is None) == (expected.counts is None)
    if found.counts is not None and expected.counts is not None:
        assert found.counts.tolist() == expected.counts.tolist()
    assert [(each.row, each.failure.message) for each in found.failures] == [
        (each.row, each.failure.message) for each in expected.failures
    ]
    pairs = [(run.rows, other.rows) for run, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True)]
    assert [(run.row, run.start) for run in found.prompt_logprobs] == [
        (run.row, run.start) for run in expected.prompt_logprobs
    ]
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        assert found.logprob_indices.tolist() == expected.logprob_indices.tolist()
        pairs.append((found.logprobs, expected.logprobs))
    for mine, theirs in pairs:
        assert mine.token_ids.numpy().tolist() == theirs.token_ids.numpy().tolist()
        assert mine.ranks.numpy().tolist() == theirs.ranks.numpy().tolist()
        assert np.allclose(mine.logprobs.numpy(), theirs.logprobs.numpy(), atol=1e-5)


def play(seed: int, twins: Twins, steps: int = 30) -> None:
    """Requests come, go, are preempted and resumed; prompts come in pieces; in the end all is compared."""
    dice, maker, left = random.Random(seed), twins.maker, []
    for _ in range(steps):
        for row in range(NUM_ROWS):
            action = dice.choice(("stay", "stay", "stay", "stay", "preempt", "enter", "resume"))
            if row in maker.tokens:
                if len(maker.tokens[row]) == MAX_MODEL_LEN or action == "enter":
                    maker.release(row)
                elif action == "preempt":
                    left.append((list(maker.tokens[row]), maker.prompts[row]))
                    maker.release(row)
            sampling = dice.choice(SAMPLINGS)
            if row not in maker.tokens and action == "resume" and left:
                tokens, num_prompt = left.pop()
                maker.enter(row, tokens, num_prompt, seed=row, **sampling)
            elif row not in maker.tokens and action == "enter":
                tokens = dice.choices(range(POISON if dice.random() < 0.9 else POISON + 1), k=dice.randint(1, 20))
                maker.enter(row, tokens, seed=len(tokens), **sampling)
        work = []
        for row in dice.sample(sorted(maker.tokens), len(maker.tokens)):
            most = len(maker.tokens[row]) - maker.computed[row]
            if most and (count := dice.choice((most, most, most, 1, 0))):
                work.append((row, count))
        for failure in twins.step(*work).failures:
            maker.release(failure.row)
    twins.drain()


@pytest.mark.parametrize("seed", every(3, range(12)))
def test_every_result_is_the_cpu_runners_with_two_steps_in_flight(seed: int) -> None:
    play(seed, Twins())


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_some_rows_leave_both_runners_the_same_tokens_to_choose_from(seed: int) -> None:
    twins = Twins(capturer=RecordingCapturer(), device=LateDevice(), masks=np.random.default_rng(seed))
    play(seed, twins)


def answers_without_drafts(samplings: tuple[dict[str, Any], ...], num_tokens: int) -> dict[int, list[int]]:
    """Prompt and answer of each row."""
    maker = PlanMaker(block_size=BLOCK_SIZE)
    runner = ModelRunner(
        HostModel(), new_cache(), BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, (3,)), vocab_size=VOCAB_SIZE
    )
    for row, sampling in enumerate(samplings):
        maker.enter(row, [row + 1, *range(5, 8 + row)], seed=row, **sampling)
    for _ in range(num_tokens):
        for row in maker.tokens:
            maker.compute(row)
        result = runner.step(maker.plan())
        maker.sampled(result.rows, result.token_ids)
    return maker.tokens


@pytest.mark.parametrize("first", every(3, range(len(SAMPLINGS))))
def test_with_drafts_of_which_some_are_right_both_runners_give_the_tokens_without(first: int) -> None:
    """Beside rows without drafts, whose last tokens the host does not know yet."""
    dice, samplings = random.Random(first), (SAMPLINGS[first:] + SAMPLINGS)[: min(NUM_ROWS, 5)]
    truth, num_several = answers_without_drafts(samplings, 22), 0
    twins = Twins(device=LateDevice())
    for row, sampling in enumerate(samplings):
        twins.maker.enter(row, [row + 1, *range(5, 8 + row)], seed=row, **sampling)
    twins.step(*range(len(samplings)))
    tokens = twins.maker.tokens
    while min(len(tokens[row]) - len(truth[row]) for row in tokens) < 0:
        work: list[tuple[Any, ...]] = []
        for row in dice.sample(sorted(tokens), dice.randint(1, len(tokens))):
            known, whole = len(tokens[row]), len(truth[row])
            drafts = truth[row][known : known + dice.choice((0, 0, 1, 3, 4))]
            if drafts and dice.random() < 0.6:
                place = dice.randrange(len(drafts))
                drafts[place] = (drafts[place] + 1) % POISON
            if known + len(drafts) < whole:
                work.append((row, None, drafts))
        if work:
            counts = twins.step(*work).counts
            num_several += counts is not None and bool((counts > 1).any())
    twins.drain()
    assert tokens == truth
    assert num_several > 3


@pytest.mark.parametrize("seed", every(3, range(8)))
def test_results_are_the_same_through_graphs_that_are_captured_meanwhile(seed: int) -> None:
    twins = Twins(capturer=RecordingCapturer(), device=LateDevice())
    before = twins.cache.clone()
    play(seed, twins, steps=40)
    used = twins.maker.next_block
    assert twins.cache[used * BLOCK_SIZE :].equal(before[used * BLOCK_SIZE :]), "a block that nobody holds was written"


@pytest.mark.parametrize("seed", every(2, range(6)))
def test_what_the_device_cannot_choose_the_host_does_with_every_token_known(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_device = int(Needs.RANDOM | Needs.TRUNCATION | Needs.PROMPT_LOGPROBS)
    monkeypatch.setattr("headrace.executor.gpu.runner.ON_THE_DEVICE", on_the_device)
    twins = Twins(capturer=RecordingCapturer(), device=LateDevice())
    play(seed, twins)


def test_without_memory_for_counts_the_host_chooses_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def out_of_memory(*shape: object, **options: object) -> torch.Tensor:
        if shape == ((NUM_ROWS + 1, VOCAB_SIZE),):
            raise torch.OutOfMemoryError
        return zeros(*shape, **options)  # type: ignore[call-overload, no-any-return]

    twins = Twins(device=LateDevice())
    monkeypatch.setattr(torch, "zeros", out_of_memory)
    play(3, twins, steps=60)
    assert twins.runner.tokens.lacks_counts


def test_counts_take_no_memory_before_a_request_has_a_frequency_penalty() -> None:
    twins = Twins()
    tokens, counted = twins.runner.tokens, 4 * (NUM_ROWS + 1) * VOCAB_SIZE
    before = tokens.nbytes
    assert before < counted
    twins.maker.enter(0, [1, 2, 1], num_prompt=1, repetition_penalty=1.3, presence_penalty=0.5)
    twins.step(0)
    assert tokens.nbytes == before
    twins.maker.enter(1, [1, 2, 1], num_prompt=1, frequency_penalty=0.5)
    twins.step(0, 1)
    assert tokens.nbytes == before + counted
    twins.drain()


@pytest.mark.parametrize("when", ["asked for", "read"])
def test_log_probabilities_of_one_prompt_that_cannot_be_told_fail_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    twins = Twins()
    failing, rows = list[LogprobsInFlight](), LogprobsInFlight.rows
    report = twins.runner.selection._report

    def fails_when_asked(logits: torch.Tensor, own_ids: torch.Tensor, count: int) -> Any:
        if when == "asked for" and int(own_ids[0]) == 8:
            raise torch.OutOfMemoryError("no memory for these")
        return report(logits, own_ids, count)

    def fails_when_read(told: LogprobsInFlight, *kept: Any) -> Any:
        if when == "read" and any(told is each for each in failing):
            raise IndexError("index 8 is out of bounds")
        return rows(told, *kept)

    twins.runner.selection._report = fails_when_asked
    monkeypatch.setattr(LogprobsInFlight, "rows", fails_when_read)
    twins.maker.enter(0, [7, 8, 9], prompt_logprobs=1, temperature=0.0)
    twins.maker.enter(1, [7, 7, 9], prompt_logprobs=1, temperature=0.0)
    twins.maker.compute(0, 3)
    twins.maker.compute(1, 3)
    plan = twins.maker.plan()
    twins.runner.submit(plan)
    failing += [told for row, _, told in twins.runner._in_flight[0].prompts.begun if row == 0]
    found, expected = twins.runner.collect(), twins.reference.step(plan)
    (failure,) = found.failures
    assert failure.row == 0
    assert "no log-probabilities of the prompt: " in failure.failure.message
    assert found.rows.tolist() == [1]
    assert found.token_ids.tolist() == expected.token_ids[1:].tolist()
    assert [(run.row, run.start) for run in found.prompt_logprobs] == [(1, 1)]
