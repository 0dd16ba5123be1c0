"""The sampler against a plain definition of each parameter, written here with Python's own integers and floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scalar_noise import scalar_noise
from thinned import every

from headrace.executor.sampling.penalties import penalise
from headrace.executor.sampling.sampler import Sampled, sample
from headrace.executor.step.batch import BatchState
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import NewRow, StepPlan
from headrace.kernels.reference.sampling import likeliest, truncated
from headrace.kernels.registry import choose_reference

EOS = 2
NONE = np.zeros(0, np.int32)


@dataclass
class Case:
    """One request as the sampler meets it."""

    tokens: list[int]
    num_prompt_tokens: int
    seed: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=10))


def run(logits: torch.Tensor, cases: list[Case], rows: list[int] | None = None) -> Sampled:
    """Puts the cases into a batch (in `rows`, by default the first ones) and samples for all of them."""
    rows = list(range(len(cases))) if rows is None else rows
    batch = BatchState(max(rows) + 1, 256, 16, (EOS,))
    new_rows = tuple(
        NewRow(
            row=row,
            token_ids=np.array(case.tokens, np.int32),
            num_prompt_tokens=case.num_prompt_tokens,
            num_computed_tokens=0,
            block_ids=NONE,
            task=Generate(sampling=case.sampling),
            seed=case.seed,
        )
        for row, case in zip(rows, cases, strict=True)
    )
    batch.apply(
        StepPlan(
            step=0,
            released_rows=NONE,
            new_rows=new_rows,
            block_tables=NONE,
            block_ids=NONE,
            rows=NONE,
            num_tokens=NONE,
            num_computed_tokens=NONE,
            sampled=NONE,
            total_tokens=0,
        )
    )
    return sample(logits.clone(), batch, np.array(rows, np.int32))


def expected_token(logits: torch.Tensor, case: Case) -> int:
    """The whole pipeline for one row, step by step over a Python list."""
    s, values = case.sampling, logits.clone()
    output = case.tokens[case.num_prompt_tokens :]
    if s.allowed_token_ids:
        values[[token for token in range(len(values)) if token not in s.allowed_token_ids]] = -math.inf
    for *begin, last in s.bad_words:
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            values[last] = -math.inf
    for token, bias in s.logit_bias.items():
        values[token] += bias
    if len(output) < s.min_tokens:
        values[[EOS, *s.stop_token_ids]] = -math.inf
    for token in set(case.tokens):
        values[token] = (
            values[token] / s.repetition_penalty if values[token] > 0 else values[token] * s.repetition_penalty
        )
    for token in set(output):
        values[token] -= np.float32(s.frequency_penalty) * np.float32(output.count(token)) + np.float32(
            s.presence_penalty
        )
    if s.temperature < 1e-5:
        return int(values.numpy().argmax())
    values /= s.temperature
    order = sorted(range(len(values)), key=lambda token: (-float(values[token]), token))
    kept = expected_survivors([float(values[token]) for token in order], s)
    scores = {token: float(values[token]) + scalar_noise(case.seed, len(case.tokens), token) for token in order[:kept]}
    return max(scores, key=lambda token: scores[token])


def expected_survivors(ordered: list[float], s: Sampling) -> int:
    """How many of the tokens, likeliest first, min_p, top_k and top_p keep."""
    probabilities = [math.exp(value - ordered[0]) for value in ordered]
    kept = sum(p >= s.min_p for p in probabilities)
    if s.top_k:
        kept = min(kept, s.top_k)
    if s.top_p < 1:
        total, mass, kept_by_p = math.fsum(probabilities[:kept]), 0.0, 0
        while kept_by_p < kept and mass < s.top_p * total:
            mass += probabilities[kept_by_p]
            kept_by_p += 1
        kept = max(1, kept_by_p)
    return kept


def random_logits(num_rows: int, vocab_size: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.bfloat16().float() if ties else logits


def mixed_cases(count: int, vocab_size: int, seed: int) -> list[Case]:
    """Every parameter on and off, in every combination that chance brings."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        num_tokens = int(rng.integers(1, 60))
        sampling = Sampling(
            max_tokens=100,
            min_tokens=int(rng.choice([0, 40])),
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_p=float(rng.choice([1.0, 0.5, 0.95, 0.9999])),
            top_k=int(rng.choice([0, 1, 5, 50, 400])),
            min_p=float(rng.choice([0.0, 0.02, 0.5])),
            presence_penalty=float(rng.choice([0.0, 0.8, -0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            stop_token_ids=tuple(int(t) for t in rng.integers(0, vocab_size, rng.integers(0, 3))),
            **token_rules(rng, vocab_size),
        )
        tokens = rng.integers(0, min(vocab_size, 30), num_tokens).tolist()
        cases.append(Case(tokens, int(rng.integers(1, num_tokens + 1)), int(rng.integers(0, 1 << 63)) * 2, sampling))
    return cases


def token_rules(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Of a third of the requests each. The words are of the few tokens that outputs have, so that many come about."""
    rules: dict[str, Any] = {}
    if rng.random() < 1 / 3:
        rules["allowed_token_ids"] = tuple(rng.permutation(vocab_size)[: vocab_size // 2].tolist())
    if rng.random() < 1 / 3:
        lengths = rng.integers(1, 4, 200)
        rules["bad_words"] = tuple(tuple(rng.integers(0, 30, length).tolist()) for length in lengths if length > 1)
        rules["bad_words"] += ((7,), (8,))
    if rng.random() < 1 / 3:
        ids = rng.permutation(vocab_size)[:9].tolist()
        rules["logit_bias"] = dict(zip(ids, rng.choice([-math.inf, -100.0, 2.5, 6.0], 9).tolist(), strict=True))
    return rules


# --- choosing a token -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", every(2, ["fastest", "reference"]))
@pytest.mark.parametrize(("vocab_size", "ties"), [(40, True), (700, False), (1500, True)])
def test_mixed_batch_equals_the_plain_definition(
    vocab_size: int, ties: bool, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if op == "reference":
        monkeypatch.setattr("headrace.kernels.choose", choose_reference)
    cases = mixed_cases(48, vocab_size, seed=vocab_size)
    logits = random_logits(len(cases), vocab_size, seed=vocab_size + 1, ties=ties)
    found = run(logits, cases)
    assert found.problems == {}
    assert found.token_ids.tolist() == [expected_token(row, case) for row, case in zip(logits, cases, strict=True)]


def test_a_rows_tokens_are_the_same_alone_and_in_a_batch_of_32() -> None:
    cases, logits = mixed_cases(32, 5000, seed=3), random_logits(32, 5000, seed=4, ties=True)
    together = run(logits, cases)
    backwards = run(logits.flip(0), cases[::-1])
    alone = [int(run(logits[i : i + 1], [case], rows=[i % 3]).token_ids[0]) for i, case in enumerate(cases)]
    assert together.token_ids.tolist() == alone
    assert backwards.token_ids.tolist() == alone[::-1]


def test_sampling_again_at_the_same_position_repeats_and_elsewhere_does_not() -> None:
    logits = torch.zeros(1, 1000)
    drawn = [int(run(logits, [Case([1] * n, 1, seed=9)]).token_ids[0]) for n in [*range(1, 30), *range(1, 30)]]
    assert drawn[:29] == drawn[29:]
    assert len(set(drawn)) > 20
    assert drawn[:29] != [int(run(logits, [Case([1] * n, 1, seed=10)]).token_ids[0]) for n in range(1, 30)]


def test_drawn_tokens_follow_the_distribution() -> None:
    """Chi-square over positions of one seed and over seeds at one position, each with 7 degrees of freedom."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.5, 1.5, -2.0]])
    probabilities = (logits[0].double() / 1.5).softmax(0).numpy()
    sampling = Sampling(max_tokens=1, temperature=1.5)
    draws = 200
    by_position = [Case([1] * (n + 1), 1, 77, sampling) for n in range(draws)]
    by_seed = [Case([1], 1, seed, sampling) for seed in range(draws * 20)]
    for cases in (by_position, by_seed):
        tokens = run(logits.repeat(len(cases), 1), cases).token_ids
        expected = probabilities * len(cases)
        counts = np.bincount(tokens, minlength=8)
        assert ((counts - expected) ** 2 / expected).sum() < 24.3  # exceeded by chance once in 1000


def test_truncated_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])
    sampling = Sampling(max_tokens=1, top_k=3)
    tokens = run(logits.repeat(4000, 1), [Case([1], 1, seed, sampling) for seed in range(4000)]).token_ids
    counts = np.bincount(tokens, minlength=8)
    expected = logits[0, :3].double().softmax(0).numpy() * 4000
    assert counts[3:].sum() == 0
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, once in 1000


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_temperatures_below_the_threshold_are_greedy_and_ties_go_to_the_lowest_id(temperature: float) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [-1.0, -7.0, -1.0, -1.0]]).repeat(10, 1)
    cases = [Case([1], 1, seed, Sampling(max_tokens=1, temperature=temperature)) for seed in range(20)]
    assert run(logits, cases).token_ids.tolist() == [1, 0] * 10


def test_top_k_of_one_is_greedy_whatever_the_seed() -> None:
    logits = random_logits(20, 500, seed=1, ties=True)
    cases = [Case([1], 1, seed, Sampling(max_tokens=1, top_k=1, temperature=2.0)) for seed in range(20)]
    assert run(logits, cases).token_ids.tolist() == logits.numpy().argmax(1).tolist()


# --- truncation -------------------------------------------------------------------------------------------------


def survivors(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    ranked = likeliest(logits[None], len(logits))
    found = truncated(logits[None], ranked, *(torch.tensor([each]) for each in (top_k, top_p, min_p)))
    return set(ranked[0][found[0] > -math.inf].tolist())


def test_top_k_keeps_the_k_highest() -> None:
    logits = random_logits(1, 1000, seed=5)[0]
    assert survivors(logits, top_k=17) == set(logits.topk(17).indices.tolist())


def test_top_p_keeps_the_smallest_nucleus() -> None:
    logits = random_logits(1, 1000, seed=6)[0]
    ordered = logits.double().softmax(0).sort(descending=True)
    size = int((ordered.values.cumsum(0) < 0.8).sum()) + 1
    assert 1 < size < 256
    assert survivors(logits, top_p=0.8) == set(ordered.indices[:size].tolist())


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = random_logits(1, 1000, seed=7)[0]
    probabilities = logits.double().softmax(0)
    expected = (probabilities >= 0.05 * probabilities.max()).nonzero()[:, 0].tolist()
    assert survivors(logits, min_p=0.05) == set(expected)


def test_top_p_is_a_share_of_what_top_k_and_min_p_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert survivors(logits, top_k=2, top_p=0.5) == {0}  # 0.4 is 0.57 of the first two
    assert survivors(logits, top_p=0.5) == {0, 1}
    assert survivors(logits, min_p=0.6, top_p=0.58) == {0, 1}


def test_a_flat_distribution_is_truncated_over_the_whole_vocabulary() -> None:
    logits = torch.zeros(1000)
    assert survivors(logits, top_p=0.5) == set(range(500))
    sampling = Sampling(max_tokens=1, top_p=0.5)
    drawn = run(logits.repeat(64, 1), [Case([1], 1, seed, sampling) for seed in range(64)]).token_ids
    assert drawn.max() < 500
    assert drawn.max() > 250


@pytest.mark.parametrize("count", [1, 7, 50, 64])
def test_equal_logits_rank_by_token_id(count: int) -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, -1.0, 1.0, 0.0, -torch.inf, torch.inf] * 8])
    order = sorted(range(64), key=lambda token: (-float(logits[0, token]), token))
    assert likeliest(logits, count)[0].tolist() == order[:count]


# --- min_tokens, penalties --------------------------------------------------------------------------------------


def test_min_tokens_forbids_endings_until_it_is_reached() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 8.0]]).repeat(3, 1)
    sampling = Sampling(max_tokens=9, min_tokens=2, temperature=0.0, stop_token_ids=(4,), ignore_eos=True)
    cases = [Case([1, 1, 1][: 1 + written], 1, 0, sampling) for written in (0, 1, 2)]
    assert run(logits, cases).token_ids.tolist() == [3, 3, EOS]


def test_min_tokens_that_leaves_no_token_fails_the_row_alone() -> None:
    logits = torch.zeros(2, 3)
    forbidden = Sampling(max_tokens=9, min_tokens=2, stop_token_ids=(0, 1))
    found = run(logits, [Case([1], 1, 0, forbidden), Case([1], 1)])
    assert list(found.problems) == [0]
    assert "min_tokens" in found.problems[0]
    assert found.good.tolist() == [False, True]


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0, 1.0, 0.5]])
    batch = BatchState(1, 16, 16)
    batch.tokens[0, :6], batch.num_tokens[0], batch.num_prompt_tokens[0] = [0, 1, 2, 3, 2, 2], 6, 2
    sampling = Sampling(max_tokens=9, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    batch.sampling.put(0, sampling, 0)
    penalise(logits, batch, np.array([0]))
    assert logits[0].tolist() == [1.0, -4.0, 1.5 - 0.75 - 0.5, -6.0 - 0.25 - 0.5, 1.0, 0.5]


@pytest.mark.parametrize("drafts", [[], [7, 3, 7, 90]])
def test_penalties_look_at_each_token_of_a_context_once_and_count_the_same(drafts: list[int]) -> None:
    rng = np.random.default_rng(3)
    sampling = Sampling(max_tokens=500, repetition_penalty=1.3, frequency_penalty=0.25, presence_penalty=0.5)
    batch, context = BatchState(2, 600, 16), rng.integers(0, 60, 600).astype(np.int32)
    batch.sampling.put(1, sampling, 0)
    batch.num_prompt_tokens[1] = 200
    for num_tokens in (200, 201, 204, 330, 331, 596):
        known = context[:num_tokens]
        batch.tokens[1, :num_tokens], batch.num_tokens[1] = known, num_tokens
        batch.tokens[1, num_tokens : num_tokens + len(drafts)] = drafts
        logits = random_logits(1, 100, seed=num_tokens)
        expected = logits[0].clone()
        output = [*known[200:].tolist(), *drafts]
        for token in {*known.tolist(), *drafts}:
            expected[token] *= 1.3 if expected[token] < 0 else 1 / 1.3
        for token in set(output):
            expected[token] -= 0.25 * output.count(token) + 0.5
        penalise(logits, batch, np.array([1]), np.array([num_tokens + len(drafts)]) if drafts else None)
        assert logits[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        batch.tokens[1, :num_tokens] = 99  # whoever looked again would count this one
    batch.sampling.put(1, sampling, 0)
    batch.tokens[1, :2], batch.num_tokens[1], batch.num_prompt_tokens[1] = (4, 5), 2, 1
    logits = torch.full((1, 100), 1.0)
    penalise(logits, batch, np.array([1]))
    assert sorted((logits[0] != 1.0).nonzero()[:, 0].tolist()) == [4, 5], "another request counts anew"


# --- logprobs ---------------------------------------------------------------------------------------------------


def test_logprobs_are_raw_with_rank_and_likeliest_and_padding() -> None:
    logits = random_logits(4, 300, seed=8, ties=True)
    samplings = [
        Sampling(max_tokens=9, temperature=0.0, logprobs=3, presence_penalty=2.0, min_tokens=5),
        Sampling(max_tokens=9, temperature=1.9),
        Sampling(max_tokens=9, temperature=1.9, top_p=0.9, logprobs=0),
        Sampling(max_tokens=9, temperature=0.5, logprobs=5),
    ]
    found = run(logits, [Case([1, 5, 6], 1, 5, sampling) for sampling in samplings])
    assert found.logprob_indices is not None
    assert found.logprobs is not None
    assert found.logprob_indices.tolist() == [0, 2, 3]
    ids, values, ranks = (getattr(found.logprobs, name).numpy() for name in ("token_ids", "logprobs", "ranks"))
    assert ids.shape == values.shape == (3, 6)
    for place, (row, count) in enumerate([(0, 3), (2, 0), (3, 5)]):
        expected = logits[row].log_softmax(0).numpy()
        token = found.token_ids[row]
        order = sorted(range(300), key=lambda t: (-expected[t], t))
        assert ids[place].tolist() == [token, *order[:count], *[-1] * (5 - count)]
        assert values[place, : count + 1] == pytest.approx(expected[ids[place, : count + 1]], abs=1e-5)
        assert ranks[place] == 1 + (expected > expected[token]).sum()


def test_logprobs_of_the_whole_vocabulary() -> None:
    logits = random_logits(1, 50, seed=9)
    found = run(logits, [Case([1], 1, 0, Sampling(max_tokens=1, logprobs=-1))])
    assert found.logprobs is not None
    assert found.logprobs.token_ids.shape == (1, 51)
    assert sorted(found.logprobs.token_ids.tolist()[1:]) == list(range(50))
    assert np.exp(found.logprobs.logprobs.numpy()[0, 1:]).sum() == pytest.approx(1.0, abs=1e-5)


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=1, logprobs=1)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, sampling: Sampling) -> None:
    logits = random_logits(3, 100, seed=10)
    healthy = run(logits, [Case([1], 1, 5, sampling)] * 3)
    logits[1, 50] = bad
    found = run(logits, [Case([1], 1, 5, sampling)] * 3)
    assert list(found.problems) == [1]
    assert found.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    if found.logprob_indices is not None:
        assert found.logprob_indices.tolist() == [0, 2]


def test_tokens_that_a_model_masks_with_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((50, 20), -torch.inf)
    logits[:, 3:6] = 0.0
    found = run(logits, [Case([1], 1, seed) for seed in range(50)])
    assert found.problems == {}
    assert set(found.token_ids.tolist()) == {3, 4, 5}
