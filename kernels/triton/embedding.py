"""Launching the embedding."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from headrace.kernels.triton.embedding_kernels import embed_kernel

BLOCK = 2048
NUM_WARPS = 4


def embed(
    token_ids: Tensor, table: Tensor, first_row: int = 0, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """As `reference_embedding.embed`; the table and out [num_tokens, width] are contiguous."""
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
            _rounded(scale, table.dtype),
            SCALED=scale != 1.0,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype))
