"""Ops on several rows of hidden values of each token, and sparse gates, in a program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_cpu_program import step
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.program.parts import Buffer
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.program.rows import (
    write_correct_rows,
    write_like_rows,
    write_mix_rows,
    write_scale_columns,
    write_sparse_gate,
)
from headrace.kernels.cpu.runtime.threads import ThreadPool

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

COUNT, SIZE = 3, 37
"""Rows of a token, and their columns: two vectors and some, or four and some."""
TOKENS = 20

Write = Callable[[Builder, list[Buffer], Buffer], None]


def found(inputs: list[Tensor], columns: int, write: Write, rows: int, threads: int) -> Tensor:
    """What the op makes of the inputs' first rows, which are token embeddings."""
    library = build.build()
    builder = Builder(Runtime(library, ThreadPool(library, threads)), max_tokens=TOKENS, max_logits=TOKENS)
    given = [builder.buffer(each.shape[1], torch.float32) for each in inputs]
    for tensor, buffer in zip(inputs, given, strict=True):
        builder.embedding(tensor, buffer)
    out, read = builder.buffer(columns, torch.float32), builder.buffer(columns, torch.float32, rows="logits")
    write(builder, given, out)
    builder.gather(out, read)
    arrays = step([list(range(rows))], [0], [rows])
    assert arrays.token_ids.dtype == np.int32
    return builder.build(read).run(arrays).clone()


def expect(inputs: list[Tensor], write: Write, wanted: Tensor) -> None:
    whole = found(inputs, wanted.shape[1], write, TOKENS, 1)
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-5, atol=1e-5)
    for rows, threads in ((1, 2), (TOKENS, 3)):
        assert torch.equal(found(inputs, wanted.shape[1], write, rows, threads), whole[:rows])


def random(*columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(TOKENS, each, generator=generator) for each in columns]


def test_rows_are_mixed_by_shares_of_each_token() -> None:
    rows, shares = random(COUNT * SIZE, COUNT * COUNT)
    each = rows.double().unflatten(1, (COUNT, SIZE))
    wanted = each + shares.double().unflatten(1, (COUNT, COUNT)) @ each
    expect(
        [rows, shares], lambda builder, given, out: write_mix_rows(builder, given[0], given[1], out), wanted.flatten(1)
    )


def test_rows_are_corrected_by_what_was_computed_of_one() -> None:
    inputs = random(COUNT * SIZE, SIZE, COUNT)
    rows, computed, shares = (each.double() for each in inputs)
    each = rows.unflatten(1, (COUNT, SIZE))
    wanted = each + (computed - each[:, 1])[:, None] * (shares + 1)[:, :, None]
    expect(inputs, lambda builder, given, out: write_correct_rows(builder, *given, out, active=1), wanted.flatten(1))


@pytest.mark.parametrize("adds", [False, True])
def test_rows_get_the_mean_square_of_a_pattern(adds: bool) -> None:
    inputs = random(COUNT * SIZE, SIZE)
    inputs[0][3] *= 1e-4  # below the least
    rows, pattern = (each.double() for each in inputs)
    each = rows.unflatten(1, (COUNT, SIZE))
    own = each.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    scaled = each * pattern.square().mean(-1, keepdim=True).sqrt()[:, None] / own
    wanted = (scaled.sum(1) + pattern) / (COUNT + 1) if adds else scaled.flatten(1)
    expect(inputs, lambda builder, given, out: write_like_rows(builder, *given, out, least=1e-5, adds=adds), wanted)


def test_a_gate_is_what_is_far_above_its_mean() -> None:
    inputs = random(5 * SIZE, 5 * SIZE)
    gate, up = (each.double() for each in inputs)
    lowest = gate.mean(-1, keepdim=True) + 0.6 * gate.std(-1, keepdim=True, correction=0)
    wanted = torch.nn.functional.gelu((gate - lowest).relu(), approximate="tanh") * up
    expect(
        inputs,
        lambda builder, given, out: write_sparse_gate(builder, *given, out, cutoff=0.6, activation="gelu_tanh"),
        wanted,
    )


def test_columns_are_scaled() -> None:
    (rows,), factors = random(SIZE), torch.rand(SIZE)
    expect(
        [rows],
        lambda builder, given, out: write_scale_columns(builder, given[0], factors, out),
        rows.double() * factors.double(),
    )


def test_rows_that_do_not_fit_are_refused() -> None:
    library = build.build()
    builder = Builder(Runtime(library, ThreadPool(library, 1)), max_tokens=4, max_logits=4)
    narrow, wide, half = (
        builder.buffer(columns, dtype)
        for columns, dtype in ((9, torch.float32), (40, torch.float32), (40, torch.bfloat16))
    )
    with pytest.raises(ValueError, match="40 columns are not 3 rows"):
        write_mix_rows(builder, wide, narrow, wide)
    with pytest.raises(ValueError, match=r"rows are float32, not torch.bfloat16"):
        write_scale_columns(builder, half, torch.ones(40), wide)
