"""Choosing tokens on the device: the host's choices, row by row, from the same parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.executor.gpu.device_state import Deltas, DeviceState, HostDevice, Staging, StateShape
from headrace.executor.gpu.sampler import StepEnding, choose, ending_for
from headrace.executor.sampling.columns import Needs
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.sampler import choose_tokens
from headrace.ipc.messages import Sampling

NUM_ROWS, VOCAB_SIZE = 12, 700


def sampling(dice: np.random.Generator, ending: StepEnding) -> Sampling:
    if ending is StepEnding.ARGMAX or dice.random() < 0.2:
        return Sampling(max_tokens=1, temperature=0.0)
    temperature = float(dice.choice([0.3, 1.0, 1.7]))
    if ending is StepEnding.DRAW:
        return Sampling(max_tokens=1, temperature=temperature)
    return Sampling(
        max_tokens=1,
        temperature=temperature,
        top_k=int(dice.choice([0, 0, 1, 7, VOCAB_SIZE + 5])),
        top_p=float(dice.choice([1.0, 0.9, 0.5, 0.05])),
        min_p=float(dice.choice([0.0, 0.0, 0.02, 1.0])),
    )


def state_of(samplings: list[Sampling], seeds: list[int]) -> DeviceState:
    state = DeviceState(StateShape(NUM_ROWS, 4), torch.device("cpu"))
    deltas = Deltas(state, Staging(HostDevice(), 2))
    for row, (each, seed) in enumerate(zip(samplings, seeds, strict=True)):
        deltas.enter(row, each, seed)
    deltas.ship()
    return state


@pytest.mark.parametrize("ending", [StepEnding.ARGMAX, StepEnding.DRAW, StepEnding.TRUNCATE])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_the_cpus_kernel(ending: StepEnding, seed: int) -> None:
    dice = np.random.default_rng(seed)
    samplings = [sampling(dice, ending) for _ in range(NUM_ROWS)]
    seeds = [int(each) for each in dice.integers(-(2**63), 2**63, NUM_ROWS)]
    rows = dice.permutation(NUM_ROWS)
    positions = dice.integers(0, 5000, NUM_ROWS).astype(np.int32)
    logits = torch.from_numpy(dice.normal(0, 3, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32))
    logits[dice.random(logits.shape) < 0.1] = -torch.inf
    logits = (logits * 4).round() / 4  # ties, as bf16 models have
    greedy = np.array([each.temperature == 0 for each in samplings])
    draws = Draws(
        temperature=np.array([each.temperature for each in samplings], np.float32)[rows],
        top_k=np.array([each.top_k for each in samplings])[rows],
        top_p=np.array([each.top_p for each in samplings])[rows],
        min_p=np.array([each.min_p for each in samplings])[rows],
        seed=np.array([each & (2**64 - 1) for each in seeds], np.uint64)[rows],
        position=positions,
    )
    expected = choose_tokens(logits, draws)
    state, before = state_of(samplings, seeds), logits.clone()
    arguments = (logits, state, torch.from_numpy(rows), torch.from_numpy(positions).long(), ending)
    found = choose(*arguments)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.best.tolist() == expected.best.tolist()
    assert logits.equal(before), "the logits are kept"
    assert greedy.all() == (ending is StepEnding.ARGMAX)


def test_large_batches_are_drawn_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [Sampling(max_tokens=1, temperature=1.0, top_p=0.9)] * NUM_ROWS
    state, logits = state_of(samplings, list(range(NUM_ROWS))), torch.randn(NUM_ROWS, VOCAB_SIZE)
    arguments = (logits, state, torch.arange(NUM_ROWS), torch.arange(NUM_ROWS), StepEnding.TRUNCATE)
    whole = choose(*arguments)
    monkeypatch.setattr("headrace.kernels.reference.sampling.TILE_ELEMENTS", 5 * VOCAB_SIZE)
    assert choose(*arguments).token_ids.equal(whole.token_ids)


def test_a_row_without_finite_logits_shows_and_harms_no_other() -> None:
    samplings = [Sampling(max_tokens=1, temperature=1.0)] * NUM_ROWS
    state, logits = state_of(samplings, list(range(NUM_ROWS))), torch.randn(NUM_ROWS, VOCAB_SIZE)
    arguments = (state, torch.arange(NUM_ROWS), torch.arange(NUM_ROWS), StepEnding.DRAW)
    expected = choose(logits, *arguments)
    logits[3, 17] = torch.nan
    found = choose(logits, *arguments)
    others = [row for row in range(NUM_ROWS) if row != 3]
    assert found.token_ids[others].equal(expected.token_ids[others])
    assert found.best.isnan().tolist() == [row == 3 for row in range(NUM_ROWS)]
    assert 0 <= int(found.token_ids[3]) < VOCAB_SIZE


def test_what_a_step_can_choose_by_itself_follows_from_its_rows_needs() -> None:
    assert ending_for(0) is StepEnding.ARGMAX
    assert ending_for(Needs.RANDOM) is StepEnding.DRAW
    assert ending_for(Needs.RANDOM | Needs.TRUNCATION) is StepEnding.TRUNCATE
    for needs in (Needs.PENALTIES, Needs.MIN_TOKENS, Needs.LOGPROBS | Needs.RANDOM, Needs.TOKEN_RULES, 1 << 8):
        assert ending_for(needs) is StepEnding.LOGITS
