"""Sampling on the CPU against the torch sampler: the same token, always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from torch import Tensor

from headrace.executor.sampling.random_numbers import gumbel_noise, row_keys
from headrace.executor.sampling.truncation import truncate
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear import Runtime
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.program_parts import SamplingColumns, sample
from headrace.kernels.cpu.threads import Pool

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


def torch_choice(logits: Tensor, columns: SamplingColumns, row: int) -> int:
    """What the torch sampler chooses, its whole vocabulary ranked."""
    if columns.temperature[row] == 0:
        return int(logits.argmax())
    tempered = (logits / torch.tensor(columns.temperature[row]))[None]
    at = slice(row, row + 1)
    found = truncate(tempered, len(logits), top_k=columns.top_k[at], top_p=columns.top_p[at], min_p=columns.min_p[at])
    key = torch.from_numpy(row_keys(columns.seed[at], columns.position[at]).view(np.int64))[:, None]
    scores = found.logits + gumbel_noise(key, found.token_ids)
    return int(found.token_ids[0, int(scores.argmax())])


@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_sampling_chooses_as_the_torch_sampler(ops: CpuOps, other_ops: list[CpuOps], vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    count = 24 if vocab > 10000 else 96
    logits = random_rows(vocab, count, generator)
    columns = SamplingColumns(ops.runtime, count, vocab)
    columns.temperature[:] = generator.choice([0, 0.3, 0.7, 1.0, 1.0, 2.5], count)
    columns.top_k[:] = generator.choice([0, 0, 0, 1, 3, 50, vocab, 2 * vocab], count)
    columns.top_p[:] = generator.choice([1.0, 1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999], count)
    columns.min_p[:] = generator.choice([0.0, 0.0, 0.0, 0.001, 0.1, 1.0], count)
    columns.seed[:] = generator.integers(0, 1 << 64, count, dtype=np.uint64)
    columns.position[:] = generator.integers(0, 100000, count)
    sample(ops.runtime, logits, columns)
    chosen = columns.token_ids.copy()
    for row in range(count):
        assert chosen[row] == torch_choice(logits[row], columns, row)
        assert columns.best[row] == logits[row].max()
    for other in other_ops:
        again = SamplingColumns(other.runtime, count, vocab)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
            getattr(again, name)[:] = getattr(columns, name)
        sample(other.runtime, logits, again)
        assert (again.token_ids == chosen).all()


@pytest.mark.parametrize("top_p", [1.0, 0.3, 0.6, 0.9], ids=["from all", "0.3", "0.6", "0.9"])
@pytest.mark.parametrize("vocab", [16, 2000])
def test_a_thousand_seeds_draw_as_the_torch_sampler(ops: CpuOps, vocab: int, top_p: float) -> None:
    generator = np.random.default_rng(vocab)
    count = 1000
    logits = torch.tensor(generator.normal(size=(10, vocab)) * 2, dtype=torch.float32).repeat(count // 10, 1)
    columns = SamplingColumns(ops.runtime, count, vocab)
    columns.temperature[:], columns.top_p[:] = 1.3, top_p
    columns.seed[:] = generator.integers(0, 1 << 64, count, dtype=np.uint64)
    sample(ops.runtime, logits, columns)
    found = truncate(
        logits / torch.tensor(np.float32(1.3)), vocab, top_k=columns.top_k, top_p=columns.top_p, min_p=columns.min_p
    )
    keys = torch.from_numpy(row_keys(columns.seed, columns.position).view(np.int64))[:, None]
    wanted = found.token_ids.gather(1, (found.logits + gumbel_noise(keys, found.token_ids)).argmax(1, keepdim=True))
    assert columns.token_ids.tolist() == wanted[:, 0].tolist()


@pytest.mark.parametrize("num_rows", [1, 6], ids=["divided among threads", "row by row"])
def test_equal_logits_choose_the_lowest_id_and_nan_shows(ops: CpuOps, num_rows: int) -> None:
    columns = SamplingColumns(ops.runtime, num_rows, 1003)
    logits = torch.zeros(num_rows, 1003)
    logits[:, [400, 401, 1002]] = 3.0
    sample(ops.runtime, logits, columns)
    assert (columns.token_ids == 400).all()
    logits[:, 900] = torch.nan
    columns.temperature[:] = 1.0
    sample(ops.runtime, logits, columns)
    assert np.isnan(columns.best).all()


def test_a_strided_matrix_of_logits_and_a_wrong_one(ops: CpuOps) -> None:
    columns = SamplingColumns(ops.runtime, 4, 50)
    logits = torch.randn(4, 64)[:, :50]
    sample(ops.runtime, logits, columns)
    assert columns.token_ids.tolist() == logits.argmax(1).tolist()
    with pytest.raises(ValueError, match="5 rows of logits; these columns have room for 4"):
        sample(ops.runtime, torch.randn(5, 50), columns)
    with pytest.raises(ValueError, match="logits are float32 rows of 50"):
        sample(ops.runtime, torch.randn(4, 51), columns)


@pytest.mark.parametrize("level", ["avx512", "avx2", "portable"])
def test_every_instruction_set_level_chooses_alike(level: str) -> None:
    try:
        library = build.build(level)
    except build.BuildError as error:
        pytest.skip(str(error))
    ops = CpuOps(Runtime(library, Pool(library, 2)))
    test_sampling_chooses_as_the_torch_sampler(ops, [], 1000)
    test_a_thousand_seeds_draw_as_the_torch_sampler(ops, 2000, 0.6)
    test_a_thousand_seeds_draw_as_the_torch_sampler(ops, 2000, 1.0)
