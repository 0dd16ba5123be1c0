"""Token embeddings with the vocabulary divided among ranks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.triton.common import rounded

BLOCK = 2048
NUM_WARPS = 4


def embed(
    token_ids: Tensor, table: Tensor, first_row: int = 0, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """As `reference.embedding.embed`. The table and out [num_tokens, width] are contiguous."""
    width = table.shape[1]
    if out is None:
        out = torch.empty((len(token_ids), width), dtype=table.dtype, device=table.device)
    if len(token_ids):
        grid = (len(token_ids), -(-width // BLOCK))
        embed_kernel[grid](
            token_ids,
            table,
            out,
            first_row,
            len(table),
            width,
            scale,
            SCALED=scale != 1.0,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit(do_not_specialize=["first_row"])
def embed_kernel(
    token_ids,  # [num_tokens]
    table,  # [num_rows, width]
    out,  # [num_tokens, width]
    first_row,
    num_rows,
    width,
    scale,
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
