"""Rows of an embedding of which a rank has a part."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.common_kernels import rounded


@triton.jit(do_not_specialize=["first_row"])
def embed_kernel(
    token_ids,  # [num_tokens]
    table,  # [num_rows, width]
    out,  # [num_tokens, width]
    first_row,
    num_rows,
    width,
    scale,  # already rounded to the table's dtype
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_tokens, ceil(width / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    local = tl.load(token_ids + token).to(tl.int64) - first_row + tl.zeros([BLOCK], tl.int64)
    mine = inside & (local >= 0) & (local < num_rows)
    row = tl.load(table + local * width + columns, mask=mine, other=0.0)
    if SCALED:
        row = rounded(row.to(tl.float32) * scale, table.dtype.element_ty)
    tl.store(out + token * width + columns, row, mask=inside)
