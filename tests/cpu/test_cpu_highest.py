"""Greedy tokens from what the projection keeps of its logits, against those chosen from the logits themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import Runtime, pack
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.program.run import Program, StepBuffers
from headrace.kernels.cpu.sampling.sampling import SampleBuffers

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

HIDDEN, MAX_ROWS = 48, 80


class Chooser:
    """A program of nothing but a table's rows and their products with a head."""

    def __init__(self, runtime: Runtime, head: Tensor, alone_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.vocab = len(head)
        builder = Builder(runtime, max_tokens=MAX_ROWS, max_logits=MAX_ROWS, alone_s=alone_s)
        table = pack(torch.randn(self.vocab, HIDDEN, generator=generator).to(head.dtype), runtime_=runtime)
        hidden = builder.buffer(HIDDEN, torch.float32)
        builder.embedding(table, hidden)
        wanted = builder.buffer(HIDDEN, torch.float32, rows="logits")
        builder.gather(hidden, wanted)
        self.logits = builder.buffer(self.vocab, torch.float32, rows="logits", highest=True)
        builder.linear(pack(head, runtime_=runtime), wanted, self.logits)
        self.columns: SampleBuffers = builder.sample(self.logits)
        self.program: Program = builder.build(self.logits)
        self.buffers = StepBuffers(max_tokens=MAX_ROWS, max_seqs=MAX_ROWS, max_logits=MAX_ROWS, max_blocks=1)
        self.buffers.query_start[:] = np.arange(MAX_ROWS + 1)
        self.buffers.token_ids[:] = np.arange(MAX_ROWS) % self.vocab
        self.buffers.logits_rows[:] = np.arange(MAX_ROWS)

    def choose(self, num_rows: int, *, only_highest: bool) -> tuple[np.ndarray, np.ndarray]:
        step = self.buffers.step
        step.num_tokens = step.num_seqs = step.num_logits = num_rows
        step.block_table_stride, step.only_highest = 1, only_highest
        self.program.run_filled(self.buffers)
        return self.columns.token_ids[:num_rows].copy(), self.columns.best[:num_rows].copy()


def random_head(vocab: int, dtype: torch.dtype) -> Tensor:
    head = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    head[vocab // 2 :] = head[: vocab - vocab // 2].clone()  # every highest logit has an equal
    return head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [3, 31, 64, 1001])
def test_the_highest_that_was_kept_is_the_first_of_the_highest_logits(
    ops: CpuOps, other_ops: list[CpuOps], vocab: int, dtype: torch.dtype
) -> None:
    head = random_head(vocab, dtype)
    for each in (ops, *other_ops):
        chooser = Chooser(each.runtime, head)
        for num_rows in (1, 2, 16, 17, MAX_ROWS):
            chooser.logits.tensor.fill_(torch.nan)
            token_ids, best = chooser.choose(num_rows, only_highest=True)
            assert chooser.logits.tensor.isnan().all(), "logits were written that nobody wanted"
            chosen, highest = chooser.choose(num_rows, only_highest=False)
            assert token_ids.tolist() == chosen.tolist() == chooser.logits.tensor[:num_rows].argmax(1).tolist()
            assert best.tolist() == highest.tolist()


def test_nan_and_infinity_among_the_logits_are_told(ops: CpuOps) -> None:
    head = random_head(1001, torch.float32)
    head[700, 0], head[3, 5] = torch.nan, torch.inf
    _, best = Chooser(ops.runtime, head).choose(20, only_highest=True)
    assert np.isnan(best).all()
    head[700, 0] = 0.0
    _, best = Chooser(ops.runtime, head).choose(20, only_highest=True)
    assert set(best[np.isinf(best)].tolist()) == {np.inf}, "some rows have a positive factor"
    assert np.isfinite(best).any(), "and some a negative one"


def test_a_step_that_is_left_to_one_thread_chooses_the_same(ops: CpuOps) -> None:
    head = random_head(1001, torch.bfloat16)
    together, alone = Chooser(ops.runtime, head), Chooser(ops.runtime, head, alone_s=1.0)
    for only_highest in (True, False):
        found, expected = (each.choose(40, only_highest=only_highest) for each in (alone, together))
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected[1].tolist()


def test_the_highest_is_kept_of_plain_products_alone(ops: CpuOps) -> None:
    builder = Builder(ops.runtime, max_tokens=1, max_logits=1)
    hidden = builder.buffer(HIDDEN, torch.float32, rows="logits")
    logits = builder.buffer(64, torch.float32, rows="logits", highest=True)
    with pytest.raises(ValueError, match="plain products"):
        builder.linear(pack(torch.randn(64, HIDDEN), runtime_=ops.runtime), hidden, logits, bias=torch.zeros(64))
