"""The Triton ops on logits against their references, and the references against the CPU's sampler."""

from __future__ import annotations

from unittest import mock

import torch
import triton
import triton.language as tl
from token_bits import pack_bits

from headrace.kernels import ops
from headrace.kernels.reference.sampling import (
    DeviceDraws,
    LogitChanges,
    Penalties,
    choose_tokens,
    gumbel_noise,
    likeliest,
    ordered_keys,
    random_words,
    truncated,
    unpack_bits,
)
from headrace.kernels.triton import logits as triton_logits
from headrace.kernels.triton import logprobs, sampling
from headrace.kernels.triton.sampling import exact_noise, rough_noise, row_key, words_of

SETTINGS = [
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 40, 0.8, 0.01),
    (1.0, 1, 1.0, 0.0),
    (5.0, 100000, 0.999, 0.0),
    (1.0, 3, 0.5, 0.9),
    (0.1, 0, 1e-12, 0.0),
]


def make_draws(num_rows: int, settings: list[tuple[float, int, float, float]]) -> DeviceDraws:
    """Row i has settings[i % len(settings)] and its own seed and position."""
    columns = list(zip(*(settings[i % len(settings)] for i in range(num_rows)), strict=True))
    return DeviceDraws(
        temperature=torch.tensor(columns[0]),
        top_k=torch.tensor(columns[1], dtype=torch.int32),
        top_p=torch.tensor(columns[2], dtype=torch.float64),
        min_p=torch.tensor(columns[3], dtype=torch.float64),
        seed=torch.randint(-(2**63), 2**63 - 1, (num_rows,)),
        position=torch.randint(0, 100_000, (num_rows,), dtype=torch.int32),
    )


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Logits rounded to bf16, so that many are equal; some masked; a few flat rows."""
    logits = (torch.randn(num_rows, vocab_size) * 3).bfloat16().float()
    logits[:, ::7] = -torch.inf
    logits[-1] = 0.5
    return logits


@triton.jit
def _noise_kernel(seed, position, words, exact, rough, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    drawn = words_of(row_key(tl.load(seed), tl.load(position)), ids)
    tl.store(words + ids, drawn.to(tl.int64, bitcast=True))
    tl.store(exact + ids, exact_noise(drawn))
    tl.store(rough + ids, rough_noise(drawn))


def case_random_words_are_those_of_the_reference_to_the_bit() -> None:
    ids = torch.arange(4096)
    for seed, position in ((0, 0), (-1, 7), (-(2**63), 2**31 - 1), (0x1234_5678_9ABC_DEF, 12345)):
        words, exact, rough = ids.clone(), torch.empty(4096, dtype=torch.float64), torch.empty(4096)
        _noise_kernel[(1,)](torch.tensor([seed]), torch.tensor([position]), words, exact, rough, BLOCK=4096)
        row = torch.tensor([seed]), torch.tensor([position])
        assert torch.equal(words, random_words(*row, ids[None])[0])
        noise = gumbel_noise(*row, ids[None])[0]
        torch.testing.assert_close(exact, noise, rtol=1e-15, atol=1e-15)
        assert (rough - noise).abs().max() < 1e-5


def case_chosen_tokens_are_those_of_the_reference() -> None:
    num_rows = len(SETTINGS) + 1
    draws, logits = make_draws(num_rows, SETTINGS), make_logits(num_rows, 2100)
    reference = choose_tokens(logits, draws)
    found = sampling.choose_tokens(logits, draws)
    assert torch.equal(found.token_ids, reference.token_ids)
    assert torch.equal(found.best, reference.best)


def case_truncation_keeps_exactly_what_the_reference_keeps() -> None:
    num_rows, vocab_size = 2 * len(SETTINGS) + 1, 300
    draws, logits = make_draws(num_rows, SETTINGS), make_logits(num_rows, vocab_size)
    keys, last_ids = sampling.find_kept(logits, draws)
    tempered = logits / torch.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
    ranked = likeliest(tempered, vocab_size)
    kept = truncated(tempered, ranked, draws.top_k, draws.top_p, draws.min_p)
    order = ordered_keys(tempered) >> 32
    ids = torch.arange(vocab_size)
    for row in range(num_rows):
        passing = (order[row] > keys[row]) | ((order[row] == keys[row]) & (ids <= last_ids[row]))
        count = int(kept[row].isfinite().sum())
        finite = logits[row].isfinite()
        if draws.temperature[row] > 0:
            assert torch.equal(ids[passing & finite], ranked[row, :count].sort().values), SETTINGS[row % 10]
        else:
            assert passing.all()


def long_case_searching_gathered_tokens_or_the_whole_row_keeps_the_same() -> None:
    """Rows of many parts with a partial last chunk. With a capacity of few tokens most rows are searched whole."""
    settings = [(1.0, 50, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 20, 0.95, 0.0), (0.6, 0, 0.999, 0.0), (1.5, 0, 0.8, 0.1)]
    draws, logits = make_draws(5, settings), make_logits(5, 4200)
    logits[0, 4199] = logits[0].max()
    expected = choose_tokens(logits, draws)
    gathered = sampling.find_kept(logits, draws)
    with mock.patch.object(sampling, "CAPACITY", 16):
        whole = sampling.find_kept(logits, draws)
    assert torch.equal(gathered[0], whole[0])
    assert torch.equal(gathered[1], whole[1])
    assert torch.equal(sampling.choose_tokens(logits, draws).token_ids, expected.token_ids)


def case_among_equal_logits_the_lowest_tokens_are_kept() -> None:
    draws, logits = make_draws(12, [(1.0, 3, 1.0, 0.0), (0.5, 0, 0.01, 0.0)]), torch.full((12, 300), 2.5)
    found = sampling.choose_tokens(logits, draws)
    assert torch.equal(found.token_ids, choose_tokens(logits, draws).token_ids)
    assert set(found.token_ids.tolist()) == {0, 1, 2}


def case_a_row_without_finite_logits_is_told_by_its_best() -> None:
    logits = torch.randn(4, 70)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    draws = make_draws(4, [(1.0, 5, 0.9, 0.0)])
    found = sampling.choose_tokens(logits, draws)
    assert found.best.isfinite().tolist() == [False, False, False, True]
    assert found.best[0].isnan()
    greedy = make_draws(4, SETTINGS[:1])
    assert torch.equal(sampling.choose_tokens(logits, greedy).token_ids, choose_tokens(logits, greedy).token_ids)


def case_a_row_chooses_the_same_alone() -> None:
    draws, logits = make_draws(10, SETTINGS), make_logits(10, 500)
    together = sampling.choose_tokens(logits, draws).token_ids
    for row in range(10):
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        alone = DeviceDraws(**{name: getattr(draws, name)[row : row + 1] for name in names})
        assert sampling.choose_tokens(logits[row : row + 1], alone).token_ids[0] == together[row]


def case_logits_are_adjusted_as_the_reference_does_to_the_bit() -> None:
    num_states, vocab_size = 4, 2100
    flags = torch.rand(num_states, vocab_size) < 0.3
    assert torch.equal(unpack_bits(pack_bits(flags), vocab_size), flags)
    counts = torch.randint(0, 3, (num_states, vocab_size), dtype=torch.int32)
    allowed = pack_bits(torch.rand(num_states, vocab_size) < 0.8)
    parts = {
        "prompt_bits": pack_bits(flags),
        "output_bits": pack_bits(counts > 0),
        "repetition": torch.tensor([1.3, 1.0, 0.7, 1.1]),
        "frequency": torch.tensor([0.5, 0.0, -0.3, 1.7]),
        "presence": torch.tensor([0.1, 0.0, 1.5, -0.3]),
    }
    penalties, uncounted = Penalties(output_counts=counts, **parts), Penalties(output_counts=None, **parts)
    rows = torch.tensor([2, 0, 3, 1, 2], dtype=torch.int32)
    for changes in (
        LogitChanges(rows),
        LogitChanges(rows, allowed),
        LogitChanges(rows, penalties=penalties),
        LogitChanges(rows.long(), penalties=uncounted),
        LogitChanges(rows, allowed, penalties),
    ):
        logits = torch.randn(len(rows), vocab_size) * 4
        logits[:, ::11] = -torch.inf
        expected = ops()["adjust_logits"].reference(logits.clone(), changes)
        assert expected.equal(logits) == (changes.allowed_bits is None and changes.penalties is None)
        found = triton_logits.adjust_logits(logits, changes)
        assert found is logits
        assert torch.equal(found, expected)


def case_logprobs_ranks_and_likeliest() -> None:
    for vocab_size, num_top in ((40, 0), (40, 5), (5, 4), (2100, 20), (2100, 33)):
        logits = make_logits(4, vocab_size)
        token_ids = torch.tensor([1, 3, vocab_size - 1, 4])
        expected = ops()["token_logprobs"].reference(logits, token_ids, num_top)
        found = logprobs.token_logprobs(logits, token_ids, num_top)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.ranks, expected.ranks)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
