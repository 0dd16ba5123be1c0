"""Launching the choice of tokens: two launches, or four where rows are truncated."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.sampling import DeviceChosen, DeviceDraws
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.sampling_kernels import chunk_kernel, pick_kernel
from headrace.kernels.triton.truncation_kernels import part_kernel, threshold_kernel

CHUNK_TOKENS = 2048
PART_TOKENS = 64
"""Of each part the highest logit and the mass are noted; top_k up to the number of parts has a bound by them."""
CAPACITY = 8192
"""Tokens above the bound that are gathered; a row with more is searched whole."""
SEARCH_TOKENS = 1024
GATHER_TOKENS = 4096
NUM_WARPS = 4
SEARCH_WARPS = 16


def choose_tokens(logits: Tensor, draws: DeviceDraws, out: DeviceChosen | None = None) -> DeviceChosen:
    """As `reference_sampling.choose_tokens`, with the same random words to the bit; out takes the result.

    Rows of logits may be strided. Masses of top_p are sums of float32 weights, exact to about 1e-6: a token on the
    edge closer than that may be kept or not.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    if out is None:
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        out = DeviceChosen(token_ids, torch.empty(num_rows, dtype=torch.float32, device=device))
    if num_rows == 0:
        return out
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    may_truncate = draws.may_draw and draws.may_truncate
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    best_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    scores = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=device) if draws.may_draw else None
    drawn = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device) if draws.may_draw else None
    kept_keys, kept_ids = find_kept(logits, draws) if may_truncate else (None, None)
    chunk_kernel[(num_rows, num_chunks)](
        logits,
        draws.temperature,
        draws.seed,
        draws.position,
        kept_keys,
        kept_ids,
        best,
        best_ids,
        scores,
        drawn,
        vocab_size,
        logits.stride(0),
        DRAW=draws.may_draw,
        TRUNCATED=may_truncate,
        BLOCK=CHUNK_TOKENS,
        num_warps=NUM_WARPS,
    )
    pick_kernel[(num_rows,)](
        draws.temperature,
        best,
        best_ids,
        scores,
        drawn,
        *out,
        num_chunks,
        DRAW=draws.may_draw,
        BLOCK=power_of_two(num_chunks),
        num_warps=1,
    )
    return out


def find_kept(logits: Tensor, draws: DeviceDraws) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p keep, as the last token kept: its tempered logit's `ordered` bits, and its id.

    Returns two [num_rows] int32. A row is kept whole where nothing truncates it.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    num_parts = num_chunks * (CHUNK_TOKENS // PART_TOKENS)
    parts = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=device)
    part_kernel[(num_rows, num_chunks)](
        logits,
        draws.temperature,
        *parts,
        vocab_size,
        logits.stride(0),
        PART=PART_TOKENS,
        BLOCK=CHUNK_TOKENS,
        num_warps=NUM_WARPS,
    )
    # Two allocations: in one, the second is aligned as Triton wants it for some numbers of rows alone.
    kept_keys, kept_ids = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    threshold_kernel[(num_rows,)](
        logits,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        *parts,
        torch.empty((num_rows, CAPACITY), dtype=torch.float32, device=device),
        torch.empty((num_rows, CAPACITY), dtype=torch.int32, device=device),
        torch.empty((num_rows, num_parts), dtype=torch.int32, device=device),
        kept_keys,
        kept_ids,
        vocab_size,
        num_parts,
        logits.stride(0),
        PART=PART_TOKENS,
        PARTS=power_of_two(num_parts),
        CAPACITY=CAPACITY,
        BLOCK=SEARCH_TOKENS,
        GATHER_BLOCK=GATHER_TOKENS,
        num_warps=SEARCH_WARPS,
    )
    return kept_keys, kept_ids
