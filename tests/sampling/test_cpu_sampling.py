"""Sampling on the CPU against its reference: the same token, always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from thinned import every
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.runtime.threads import ThreadPool
from headrace.kernels.cpu.sampling import sampling
from headrace.kernels.cpu.sampling.sampling import SampleBuffers, sample
from headrace.kernels.reference import sampling as reference
from headrace.kernels.reference.sampling import DeviceDraws, choose_tokens

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


def random_rows(vocab: int, count: int, generator: np.random.Generator) -> Tensor:
    """Logits as models make them: peaked, flat, with ties, with masked tokens."""
    rows = []
    for i in range(count):
        row = generator.normal(size=vocab) * [1.0, 4.0, 0.01, 2.5][i % 4]
        if i % 3 == 0:
            row = np.round(row, 1)
        if i % 5 == 0:
            row[generator.integers(0, vocab, vocab // 4)] = -np.inf
        rows.append(row)
    return torch.tensor(np.array(rows), dtype=torch.float32)


def reference_of(logits: Tensor, buffers: SampleBuffers) -> list[int]:
    same = {name: torch.from_numpy(getattr(buffers, name)) for name in ("temperature", "top_p", "min_p", "position")}
    top_k, seed = torch.from_numpy(buffers.top_k).int(), torch.from_numpy(buffers.seed.view(np.int64))
    return choose_tokens(logits, DeviceDraws(**same, top_k=top_k, seed=seed)).token_ids.tolist()


@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_sampling_chooses_as_the_reference(ops: CpuOps, other_ops: list[CpuOps], vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    count = 24 if vocab > 10000 else 96
    logits = random_rows(vocab, count, generator)
    buffers = SampleBuffers(ops.runtime, count, vocab)
    buffers.temperature[:] = generator.choice([0, 0.3, 0.7, 1.0, 1.0, 2.5], count)
    buffers.top_k[:] = generator.choice([0, 0, 0, 1, 3, 50, vocab, 2 * vocab], count)
    buffers.top_p[:] = generator.choice([1.0, 1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999], count)
    buffers.min_p[:] = generator.choice([0.0, 0.0, 0.0, 0.001, 0.1, 1.0], count)
    buffers.seed[:] = generator.integers(0, 1 << 64, count, dtype=np.uint64)
    buffers.position[:] = generator.integers(0, 100000, count)
    sample(ops.runtime, logits, buffers)
    chosen = buffers.token_ids.copy()
    assert chosen.tolist() == reference_of(logits, buffers)
    assert buffers.best.tolist() == logits.amax(1).tolist()
    for other in other_ops:
        again = SampleBuffers(other.runtime, count, vocab)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
            getattr(again, name)[:] = getattr(buffers, name)
        sample(other.runtime, logits, again)
        assert (again.token_ids == chosen).all()


@pytest.mark.parametrize("count", every(2, [1, 2, 40]), ids=["threads share a row", "a row each", "many"])
@pytest.mark.parametrize("vocab", [5, 1000, 33_333])
def test_what_a_mask_forbids_is_not_chosen(ops: CpuOps, other_ops: list[CpuOps], vocab: int, count: int) -> None:
    generator = np.random.default_rng(count)
    logits = random_rows(vocab, count, generator)
    allowed = generator.random((count, vocab)) < generator.choice([0.01, 0.5, 1.0], (count, 1))
    allowed[np.arange(count), generator.integers(0, vocab, count)] = True
    is_masked = np.arange(count) % 3 != 2
    if count > 3:
        logits[3, vocab // 2] = torch.nan
        allowed[3] = np.arange(vocab) == 0
    expected = logits.masked_fill(torch.from_numpy(is_masked[:, None] & ~allowed) & logits.isfinite(), -torch.inf)
    for each in (ops, *other_ops):
        buffers, given = SampleBuffers(each.runtime, count, vocab), logits.clone()
        buffers.temperature[:] = generator.choice([0, 0.7, 1.0], count)
        buffers.top_k[:], buffers.top_p[:] = generator.choice([0, 50], count), generator.choice([1.0, 0.9], count)
        buffers.is_masked[:] = is_masked
        words = np.packbits(allowed, axis=1, bitorder="little")
        buffers.masks.view(np.uint8)[:, : words.shape[1]] = words
        sample(each.runtime, given, buffers)
        assert np.array_equal(buffers.best, expected.amax(1).numpy(), equal_nan=True)
        good = np.isfinite(buffers.best)
        chosen = np.array(reference_of(expected, buffers))
        assert buffers.token_ids[good].tolist() == chosen[good].tolist()


@pytest.mark.parametrize("top_p", every(2, [1.0, 0.3, 0.6, 0.9]), ids=["from all", "0.3", "0.6", "0.9"])
@pytest.mark.parametrize("vocab", [16, 2000])
def test_a_thousand_seeds_draw_as_the_reference(ops: CpuOps, vocab: int, top_p: float) -> None:
    generator = np.random.default_rng(vocab)
    count = 1000
    logits = torch.tensor(generator.normal(size=(10, vocab)) * 2, dtype=torch.float32).repeat(count // 10, 1)
    buffers = SampleBuffers(ops.runtime, count, vocab)
    buffers.temperature[:], buffers.top_p[:] = 1.3, top_p
    buffers.seed[:] = generator.integers(0, 1 << 64, count, dtype=np.uint64)
    sample(ops.runtime, logits, buffers)
    assert buffers.token_ids.tolist() == reference_of(logits, buffers)


@pytest.mark.parametrize("num_rows", [1, 6], ids=["divided among threads", "row by row"])
def test_equal_logits_choose_the_lowest_id_and_nan_shows(ops: CpuOps, num_rows: int) -> None:
    buffers = SampleBuffers(ops.runtime, num_rows, 1003)
    logits = torch.zeros(num_rows, 1003)
    logits[:, [400, 401, 1002]] = 3.0
    sample(ops.runtime, logits, buffers)
    assert (buffers.token_ids == 400).all()
    logits[:, 900] = torch.nan
    buffers.temperature[:] = 1.0
    sample(ops.runtime, logits, buffers)
    assert np.isnan(buffers.best).all()


def test_a_strided_matrix_of_logits_and_a_wrong_one(ops: CpuOps) -> None:
    buffers = SampleBuffers(ops.runtime, 4, 50)
    logits = torch.randn(4, 64)[:, :50]
    sample(ops.runtime, logits, buffers)
    assert buffers.token_ids.tolist() == logits.argmax(1).tolist()
    with pytest.raises(ValueError, match="5 rows of logits; these buffers have room for 4"):
        sample(ops.runtime, torch.randn(5, 50), buffers)
    with pytest.raises(ValueError, match="logits are float32 rows of 50"):
        sample(ops.runtime, torch.randn(4, 51), buffers)


@pytest.mark.parametrize("level", every(2, ["avx512", "avx2", "portable"]))
def test_every_instruction_set_level_chooses_alike(level: str) -> None:
    try:
        library = build.build(level)
    except build.BuildError as error:
        pytest.skip(str(error))
    ops = CpuOps(Runtime(library, ThreadPool(library, 2)))
    test_sampling_chooses_as_the_reference(ops, [], 1000)
    test_a_thousand_seeds_draw_as_the_reference(ops, 2000, 0.6)
    test_a_thousand_seeds_draw_as_the_reference(ops, 2000, 1.0)


def test_as_an_op_it_reads_no_column_that_the_hosts_bounds_rule_out() -> None:
    logits = random_rows(500, 8, np.random.default_rng(2))
    unread = torch.full((8,), torch.nan, dtype=torch.float64)
    columns = {"top_k": torch.ones(8, dtype=torch.int32), "top_p": unread, "min_p": unread}
    rows = {"seed": torch.arange(8), "position": torch.arange(8, dtype=torch.int32)}
    drawn = DeviceDraws(temperature=torch.ones(8), **columns, **rows, may_truncate=False)
    assert sampling.choose_tokens(logits, drawn).token_ids.tolist() == choose_tokens(logits, drawn).token_ids.tolist()
    greedy = DeviceDraws(temperature=torch.ones(8), **columns, **rows, may_draw=False, may_truncate=False)
    assert sampling.choose_tokens(logits, greedy).token_ids.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("level", every(2, ["own", "avx512", "avx2", "portable"]))
@pytest.mark.parametrize("vocab", [5, 1000, 49_152])
def test_log_probabilities_are_those_of_the_reference(level: str, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if level != "own":
        try:
            library = build.build(level)
        except build.BuildError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(sampling, "runtime", lambda: Runtime(library, ThreadPool(library, 2)))
    generator = np.random.default_rng(vocab)
    logits = random_rows(vocab, 15, generator)
    own = torch.from_numpy(np.array([int(generator.choice(np.flatnonzero(row > -np.inf))) for row in logits.numpy()]))
    for num_top in (0, 1, 5, 20, 300, vocab):
        if num_top > vocab or (level != "own" and num_top > 300):
            continue
        found, expected = (each(logits, own, num_top) for each in (sampling.token_logprobs, reference.token_logprobs))
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.ranks, expected.ranks)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=3e-7, atol=1e-6)
        alone = [sampling.token_logprobs(logits[row : row + 1], own[row : row + 1], num_top) for row in (3, 14)]
        for row, one in zip((3, 14), alone, strict=True):
            assert torch.equal(one.logprobs[0], found.logprobs[row])
