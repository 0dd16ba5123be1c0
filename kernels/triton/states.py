"""What kernels of layers that keep a state per sequence share: where a state lies, and what a step does with it, as
`kernels/reference/states.py` describes both."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.states import KeptUnits, StateBatch

STEP = (
    *("query_start", "rows", "pages", "sources", "has_source", "replayed", "committed"),
    *("snapshot_start", "snapshot_ends", "snapshot_pages", "page_stride", "flag_stride"),
)
"""Parameters of every kernel, in the order of `step_arguments`. Their alignment and values differ from step to step, so
that no kernel may be compiled for them: each has them in its do_not_specialize."""


def step_arguments(batch: StateBatch) -> tuple[Any, ...]:
    """Raises ValueError if the parts of a step are not side by side alike."""
    page_stride, flag_stride = batch.pages.stride(0), batch.has_source.stride(0)
    by_page, flags = (batch.sources, batch.snapshot_pages), (batch.replayed, batch.committed, batch.snapshot_ends)
    if not all(_has_stride(each, page_stride) for each in by_page) or not all(
        _has_stride(each, flag_stride) for each in flags
    ):
        raise ValueError("the pages of a step's states have one stride, and so have the other parts")
    return (
        *(batch.query_start, batch.rows, batch.pages, batch.sources, batch.has_source, batch.replayed),
        *(batch.committed, batch.snapshot_start, batch.snapshot_ends, batch.snapshot_pages, page_stride, flag_stride),
    )


def _has_stride(tensor: Tensor, stride: int) -> bool:
    return len(tensor) < 2 or tensor.stride(0) == stride


def unit_arguments(units: KeptUnits) -> tuple[Any, ...]:
    """memory, unit_pages, unit_offsets and page_elements, as kernels take them."""
    return units.memory, units.page, units.offset, units.memory.shape[1]


@triton.jit
def unit_at(memory, unit_pages, unit_offsets, page_elements, pages, unit):
    """Where a unit of a state, or each of several, begins. pages: of the sequence."""
    number = tl.load(pages + tl.load(unit_pages + unit)).to(tl.int64)
    return memory + number * page_elements + tl.load(unit_offsets + unit)


@triton.jit
def end_of_part(part, last, own_end, snapshot_ends, snapshot_pages, flag_stride, pages, page_stride, seq):
    """Where a part of a sequence's step ends, and the pages that keep the state of there: of a snapshot, and from
    `last` on the sequence's own, at `own_end`."""
    end = own_end
    into = pages + seq * page_stride
    if part < last:
        end = tl.load(snapshot_ends + part * flag_stride)
        into = snapshot_pages + part * page_stride
    return end, into


def keep_drafts(x: Tensor, first_element: int, batch: StateBatch, drafted: Tensor) -> None:
    """Keeps x [num_tokens, columns] of the step's drafts in drafted [rows, drafts, elements], from this element on,
    once what the step before kept there has been read."""
    if batch.max_query_len == 1:
        return  # there are none
    keep_drafts_kernel[(len(batch.rows), -(-x.shape[1] // KEPT_COLUMNS))](
        x,
        drafted,
        batch.query_start,
        batch.rows,
        batch.committed,
        x.shape[1],
        x.stride(0),
        first_element,
        drafted.stride(0),
        drafted.stride(1),
        batch.committed.stride(0),
        BLOCK=KEPT_COLUMNS,
        num_warps=4,
    )


KEPT_COLUMNS = 1024


@triton.jit(do_not_specialize=["query_start", "rows", "committed", "flag_stride"])
def keep_drafts_kernel(
    x,  # [num_tokens, x_stride]
    drafted,  # [rows, drafts, elements] float32
    query_start,
    rows,
    committed,
    size,
    x_stride,
    first_element,
    row_stride,
    draft_stride,
    flag_stride,
    BLOCK: tl.constexpr,
):
    """Grid (num_seqs, blocks of columns)."""
    seq = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(query_start + seq).to(tl.int64)
    count = (tl.load(query_start + seq + 1) - begin).to(tl.int32)
    known = tl.load(committed + seq * flag_stride)
    into = drafted + tl.load(rows + seq).to(tl.int64) * row_stride + first_element
    for draft in range(0, count - known):
        values = tl.load(x + (begin + known + draft) * x_stride + columns, mask=columns < size, other=0.0)
        tl.store(into + draft * draft_stride + columns, values.to(tl.float32), mask=columns < size)


@triton.jit
def input_at(index, replayed, tokens, token_stride, drafts, draft_stride, columns, size):
    """Columns [N] of a sequence's input `index`, of which there are `size`: [N] float32, of a replayed draft or of one
    of the step's tokens. tokens, drafts: where the first ones begin."""
    of_drafts = columns < tl.where(index < replayed, size, 0)
    of_tokens = columns < tl.where(index < replayed, 0, size)
    token = (index - replayed).to(tl.int64)
    from_drafts = tl.load(drafts + index * draft_stride + columns, mask=of_drafts, other=0.0)
    return from_drafts + tl.load(tokens + token * token_stride + columns, mask=of_tokens, other=0.0).to(tl.float32)


@triton.jit
def number_at(index, replayed, tokens, token_stride, drafts, draft_stride):
    """As `input_at`, of one column, which tokens and drafts point to: a number."""
    columns = tl.arange(0, 1)
    return tl.sum(input_at(index, replayed, tokens, token_stride, drafts, draft_stride, columns, 1), 0)


@triton.jit
def softplus(x):
    """ln(1 + e^x), as max(x, 0) + ln(1 + y) for y = e^-|x|, whose logarithm is 2 artanh(y / (2 + y)), as a series."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    total = square * 0.0 + 1.0 / 17.0
    for step in tl.static_range(8):
        total = total * square + 1.0 / (15.0 - 2.0 * step)
    return tl.maximum(x, 0.0) + 2.0 * s * total


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
