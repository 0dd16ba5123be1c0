"""Triton's adapters of linear layers against the reference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.executor.step.adapters import TokenAdapters
from headrace.kernels import ops
from headrace.kernels.low_rank import LowRank, LowRankPart, SlotLimits, SlottedTokens
from headrace.kernels.reference.low_rank import SlottedDeltas
from headrace.kernels.triton import low_rank

CPU = torch.device("cpu")
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of errors relative to the largest result."""
ROWS, COLUMNS, RANK = (24, 16), 40, 5
TOKENS = TokenAdapters(
    np.array([[2, -1, 0, 2, 0, -1, 2], [-1, -1, 2, 0, -1, -1, -1]], np.int32),
    np.array([[1.0, 0, 0.5, -2.0, 1.0, 0, 1.0], [0, 0, 1.5, 0.25, 0, 0, 0]], np.float32),
)


def delta_of(generator: torch.Generator, **more: Tensor) -> LowRank:
    """Of a layer of two matrices, the second of which has a rank of its own."""
    parts, first_row, first_column = [], 0, 0
    for rows, rank in zip(ROWS, (RANK, 4), strict=True):
        parts.append(LowRankPart(first_row, first_column, torch.randn(rows, rank, generator=generator), 0.5))
        first_row, first_column = first_row + rows, first_column + rank
    return LowRank(first_row, torch.randn(first_column, COLUMNS, generator=generator), tuple(parts), **more)


def slotted(tokens: TokenAdapters) -> SlottedTokens:
    """As the host sends them to a GPU."""
    slots, scales = (torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens.slots, tokens.scales))
    return SlottedTokens(tuple(zip(slots, scales, strict=True)))


def both(
    dtype: torch.dtype, deltas: dict[int, LowRank], bias: Tensor | None, only: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton's result, the reference's, and the product without adapters. only: of this token."""
    generator = torch.Generator().manual_seed(3)
    own = np.arange(TOKENS.slots.shape[1]) if only is None else np.array([only])
    tokens, count = TOKENS.of(own), TOKENS.slots.shape[1]
    x = torch.randn(count, COLUMNS, generator=generator).to(dtype)[own]
    product = torch.randn(count, sum(ROWS), generator=generator).to(dtype)[own]
    limits = SlotLimits(dtype, 3, 2, RANK)
    given = limits, sum(ROWS), COLUMNS, len(ROWS), bias, CPU
    expected, found = ops()["low_rank"].reference(*given), low_rank.TritonDeltas(*given)
    for table in (expected, found):
        table.put(1, table.pack(delta_of(generator)))  # which no token has
        for slot, delta in deltas.items():
            table.put(slot, table.pack(delta))
    on_device = slotted(tokens)
    stacked = SlottedDeltas(*given)
    for slot, delta in enumerate(expected._slots):
        if delta is not None:
            stacked.put(slot, stacked.pack(delta))
    result = expected.added(x, product, tokens)
    assert_close(stacked.added(x, product, on_device), result)
    return found.added(x, product, on_device), result, product


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bound = BOUND[expected.dtype] * (1 + float(expected.abs().max()))
    assert (found.double() - expected.double()).abs().max() < bound


def case_rows_of_several_adapters_in_any_order() -> None:
    for dtype in BOUND:
        generator = torch.Generator().manual_seed(1)
        deltas = {slot: delta_of(generator) for slot in (0, 2)}
        found, expected, product = both(dtype, deltas, None)
        assert_close(found, expected)
        none = TOKENS.slots.max(0) < 0
        assert torch.equal(found[none], product[none]), "a row without adapters has other bits"
        assert not torch.equal(found[~none], product[~none])


def case_biases_and_magnitudes() -> None:
    generator = torch.Generator().manual_seed(2)
    bias, added = torch.randn(2, sum(ROWS), generator=generator)
    deltas = {0: delta_of(generator, magnitude=1 + bias.abs()), 2: delta_of(generator, bias=added)}
    found, expected, _ = both(torch.float32, deltas, bias)
    assert_close(found, expected)


def case_a_row_does_not_depend_on_the_others_and_a_slot_is_filled_anew() -> None:
    generator = torch.Generator().manual_seed(4)
    deltas = {slot: delta_of(generator) for slot in (0, 2)}
    found, _, _ = both(torch.float32, {2: deltas[2]}, None)
    alone, _, _ = both(torch.float32, {2: deltas[2]}, None, only=3)
    assert torch.equal(found[3:4], alone)
    table = low_rank.TritonDeltas(SlotLimits(torch.float32, 3, 2, RANK), sum(ROWS), COLUMNS, len(ROWS), None, CPU)
    table.put(0, table.pack(deltas[0]))
    table.put(0, table.pack(LowRank(sum(ROWS), deltas[2].a[:2], deltas[2].parts[:0])))
    assert not table._b.any(), "the former adapter's factors are left"
