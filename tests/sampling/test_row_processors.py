"""typical_p, top_n_sigma, xtc, dry and mirostat against their definitions, written out in float64 for one row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scalar_noise import scalar_noise
from test_sampler import Case, random_logits, run

from headrace.executor.sampling import rows as rows_module
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.random_numbers import uniform
from headrace.executor.sampling.row_processors import RowProcessor, kinds, mirostat, processors_of
from headrace.executor.sampling.sampler import Sampled, sample
from headrace.executor.step.batch import BatchState
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import NewRow
from headrace.kernels.reference.sampling import likeliest, truncated

VOCABULARY = 300


def entered(tokens: list[int], num_prompt_tokens: int, seed: int, sampling: Sampling) -> BatchState:
    """A batch of one row."""
    batch = BatchState(1, 256, 16, (0,))
    batch._enter(
        NewRow(
            row=0,
            token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=0,
            block_ids=np.zeros(0, np.int32),
            task=Generate(sampling=sampling),
            seed=seed,
        )
    )
    return batch


def step(batch: BatchState, logits: torch.Tensor) -> Sampled:
    sampled = sample(logits[None].clone(), batch, np.zeros(1, np.int32))
    batch.append_sampled(np.zeros(1, np.int32), sampled.token_ids)
    return sampled


def left(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Token id -> tempered logit, of what min_p, top_k and top_p keep."""
    values = (logits / float(np.float32(sampling.temperature))).double().tolist()
    order = sorted((token for token in range(len(values)) if values[token] > -math.inf), key=lambda t: (-values[t], t))
    order = [token for token in order if math.exp(values[token] - values[order[0]]) >= sampling.min_p]
    order = order[: sampling.top_k or len(order)]
    if sampling.top_p < 1:
        total, mass, count = math.fsum(math.exp(values[t]) for t in order), 0.0, 0
        while mass < sampling.top_p * total:
            mass, count = mass + math.exp(values[order[count]]), count + 1
        order = order[:count]
    return {token: values[token] for token in order}


def shares(values: dict[int, float]) -> dict[int, float]:
    total = math.fsum(math.exp(value) for value in values.values())
    return {token: math.exp(value) / total for token, value in values.items()}


def drawn(values: dict[int, float], seed: int, position: int) -> int:
    return max(values, key=lambda token: values[token] + scalar_noise(seed, position, token))


def typical(values: dict[int, float], share: float) -> dict[int, float]:
    p = shares(values)
    entropy = -math.fsum(each * math.log(each) for each in p.values())
    mass, kept = 0.0, {}
    for token in sorted(p, key=lambda t: (abs(-math.log(p[t]) - entropy), t)):
        if mass >= share:
            break
        kept[token], mass = values[token], mass + p[token]
    return kept


def without_top_choices(values: dict[int, float], threshold: float) -> dict[int, float]:
    p = shares(values)
    top = sorted((token for token in p if p[token] >= threshold), key=lambda t: (-values[t], t))
    return {token: value for token, value in values.items() if token not in top[:-1]}


def expected(logits: torch.Tensor, case: Case) -> int:
    s, position = case.sampling, len(case.tokens)
    if s.dry_multiplier > 0:
        logits = logits - torch.tensor([loss(case.tokens, s, token) for token in range(len(logits))])
    if s.top_n_sigma > 0:
        values = [each for each in logits.double().tolist() if each > -math.inf]
        mean = math.fsum(values) / len(values)
        sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in values) / len(values))
        logits = torch.where(logits < max(values) - s.top_n_sigma * sigma, -math.inf, logits)
    kept = left(logits, s)
    if s.typical_p < 1:
        kept = typical(kept, s.typical_p)
    if s.xtc_probability > 0 and uniform(case.seed, position) < s.xtc_probability:
        kept = without_top_choices(kept, s.xtc_threshold)
    return drawn(kept, case.seed, position)


def loss(tokens: list[int], s: Sampling, token: int) -> float:
    """dry's, by comparing every earlier place's run with the end, a token at a time."""
    longest = 0
    for end in range(len(tokens) - 1):
        if tokens[end + 1] != token or token in s.dry_breaker_token_ids:
            continue
        length = 0
        while length < 50 and end - length >= 0:
            if tokens[end - length] != tokens[-1 - length] or tokens[end - length] in s.dry_breaker_token_ids:
                break
            length += 1
        longest = max(longest, length)
    return s.dry_multiplier * s.dry_base ** (longest - s.dry_allowed_length) if longest >= s.dry_allowed_length else 0.0


FIELDS: list[dict[str, Any]] = [
    {"typical_p": 0.2},
    {"typical_p": 0.9, "top_k": 40},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "top_p": 0.8},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0.001},
    {"dry_multiplier": 0.8, "dry_breaker_token_ids": (3,)},
    {"dry_multiplier": 6.0, "dry_allowed_length": 1, "dry_base": 1.2},
    {"dry_multiplier": 2.0, "typical_p": 0.7, "xtc_probability": 0.7, "xtc_threshold": 0.02, "top_n_sigma": 2.0},
]


@pytest.mark.parametrize("fields", FIELDS, ids=" ".join)
def test_a_processor_equals_its_paper(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    cases = [
        Case(
            rng.integers(0, 5, 40).tolist(),
            int(rng.integers(1, 40)),
            int(rng.integers(0, 1 << 62)),
            Sampling(max_tokens=99, temperature=float(rng.choice([0.5, 1.0, 1.4])), **fields),
        )
        for _ in range(24)
    ]
    logits = random_logits(len(cases), VOCABULARY, seed=5)
    found = run(logits, cases)
    assert found.problems == {}
    assert found.token_ids.tolist() == [expected(row, case) for row, case in zip(logits, cases, strict=True)]
    plain = [Case(each.tokens, each.num_prompt_tokens, each.seed, Sampling(max_tokens=99)) for each in cases]
    assert found.token_ids.tolist() != run(logits, plain).token_ids.tolist(), "the field does something"


def test_dry_looks_back_over_its_last_tokens_alone_and_greedy_requests_obey_it() -> None:
    tokens, logits = [9, 8, 7, 1, 2, 9, 8], torch.zeros(VOCABULARY)
    logits[7], logits[5] = 2.0, 1.0
    for last_n, token in ((-1, 5), (7, 5), (6, 5), (5, 7), (0, 7)):
        s = Sampling(
            max_tokens=9,
            temperature=0.0,
            dry_multiplier=9.0,
            dry_penalty_last_n=last_n,
            dry_allowed_length=1 + (last_n != 6),
        )
        assert run(logits[None], [Case(tokens, 3, 0, s)]).token_ids.tolist() == [token], last_n


def test_typical_p_and_xtc_leave_greedy_requests_alone() -> None:
    logits = random_logits(1, VOCABULARY, seed=1)
    s = Sampling(max_tokens=9, temperature=0.0, typical_p=0.01, xtc_probability=1.0, xtc_threshold=0.0, mirostat=2)
    assert run(logits, [Case([1], 1, 0, s)]).token_ids.tolist() == [int(logits.argmax())]


def mirostat_tokens(steps: torch.Tensor, seed: int, s: Sampling) -> Iterator[int]:
    """Both versions of the paper over steps [num_steps, vocab_size] of logits, behind a prompt of one token."""
    bound = 2 * s.mirostat_tau
    for position, logits in enumerate(steps, 1):
        values = left(logits, s)
        p = shares(values)
        order = sorted(p, key=lambda t: (-values[t], t))
        if s.mirostat == 2:
            count = sum(-math.log2(each) <= bound for each in p.values())
        else:
            pairs = list(itertools.pairwise(order[:100]))
            t = [math.log((i + 2) / (i + 1)) for i in range(len(pairs))]
            b = [math.log(p[one] / p[other]) for one, other in pairs]
            s_hat = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
            epsilon = s_hat - 1
            count = int((epsilon * 2**bound / (1 - len(logits) ** -epsilon)) ** (1 / s_hat))
        kept = {token: values[token] for token in order[: max(1, count)]}
        token = drawn(kept, seed, position)
        bound -= s.mirostat_eta * (-math.log2(shares(kept)[token]) - s.mirostat_tau)
        yield token


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_its_paper_and_goes_on_after_a_preemption(version: int) -> None:
    s = Sampling(max_tokens=99, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.3, temperature=1.3)
    steps, seed = random_logits(30, VOCABULARY, seed=8) / 2, 12345
    batch, tokens = entered([4], 1, seed, s), [4]
    for logits in steps:
        if len(tokens) in (12, 13, 25):
            batch = entered(tokens, 1, seed, s)  # as a request comes back
        sampled = step(batch, logits)
        assert sampled.problems == {}
        tokens.append(int(sampled.token_ids[0]))
    assert tokens[1:] == list(mirostat_tokens(steps, seed, s))


def test_a_mirostat_bound_that_is_lost_fails_the_request_and_does_not_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirostat, "_KEPT", mirostat.KeptBounds())
    s = Sampling(max_tokens=99, mirostat=2)
    found = step(entered([4, 5], 1, 99, s), random_logits(1, VOCABULARY, seed=8)[0])
    assert "its bound is not here" in found.problems[0]


def test_bounds_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirostat, "MOST_KEPT", 3)
    kept = mirostat.KeptBounds()
    for seed in range(5):
        kept.put(rows_module.Position(np.array([1], np.int32), 1, seed, 9), 2, float(seed))
    after = [rows_module.Position(np.array([1, 2], np.int32), 1, seed, 9) for seed in range(5)]
    assert [kept.get(each) for each in after[2:]] == [2.0, 3.0, 4.0]
    with pytest.raises(LookupError):
        kept.get(after[1])


class Broken(RowProcessor):
    def keep(self, candidates: Any, at: Any) -> Any:
        raise ValueError("no such luck")


def test_a_processor_that_raises_ends_its_row_alone() -> None:
    logits = random_logits(3, VOCABULARY, seed=2)
    plain = run(logits, [Case([1], 1, seed) for seed in range(3)]).token_ids.tolist()
    batch = BatchState(3, 256, 16, ())
    for row in range(3):
        sampling = Sampling(max_tokens=9, typical_p=0.5 if row == 1 else 1.0)
        block_ids = np.zeros(0, np.int32)
        batch._enter(
            NewRow(
                row=row,
                token_ids=np.array([1], np.int32),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=block_ids,
                task=Generate(sampling=sampling),
                seed=row,
            )
        )
    batch.sampling.processors[1] = (Broken(),)
    found = sample(logits, batch, np.arange(3, dtype=np.int32))
    assert found.problems == {1: "its processor Broken failed: ValueError: no such luck"}
    assert [found.token_ids[0], found.token_ids[2]] == [plain[0], plain[2]]


@pytest.mark.parametrize("top_k", [1, 3, 50, 400])
@pytest.mark.parametrize("top_p", [0.4, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_only_what_top_k_keeps_is_ranked_and_the_rest_is_cut_alike(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(7)).round(decimals=1) * 3  # with equals
    one = np.ones(1)
    draws = Draws(
        temperature=np.float32(0.8) * one.astype(np.float32),
        top_k=top_k * one.astype(np.int32),
        top_p=top_p * one,
        min_p=min_p * one,
        seed=one.astype(np.int64),
        position=one.astype(np.int32),
    )
    found = rows_module.truncate_row(logits, draws, 0)
    tempered = logits[None] / torch.from_numpy(draws.temperature)
    ranked = likeliest(tempered, 300)
    columns = (torch.from_numpy(column) for column in (draws.top_k, draws.top_p, draws.min_p))
    values = truncated(tempered, ranked, *columns)[0]
    kept = values.isfinite()
    assert found.token_ids.tolist() == ranked[0][kept].tolist()
    assert found.logits.tolist() == values[kept].tolist()


def test_a_request_has_the_processors_whose_fields_it_sets() -> None:
    assert not processors_of(Sampling(max_tokens=1))
    for kind in kinds():
        value = 0.5 if kind.field == "typical_p" else 1
        (only,) = processors_of(Sampling(max_tokens=1, **{kind.field: value}))
        assert type(only) is type(kind.of(Sampling(max_tokens=1, **{kind.field: value})))
