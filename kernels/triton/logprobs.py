"""Launching log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference import sampling as reference_sampling
from headrace.kernels.reference.sampling import TokenLogprobs
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.logprobs_kernels import chunk_logprobs_kernel, row_logprobs_kernel

CHUNK_TOKENS = 2048
NUM_WARPS = 4
MOST_TOP = 32
"""Beyond this many, the likeliest are found by torch's own top-k, which does not wait for the device either."""
COMPILED_TOPS = (0, 8, MOST_TOP)
"""The kernels find so many, of which the first are given: for others they would be compiled while serving."""


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """As `reference_sampling.token_logprobs`. Two launches."""
    found = next((top for top in COMPILED_TOPS if num_top <= top <= logits.shape[1]), None)
    if found is None:
        return reference_sampling.token_logprobs(logits, token_ids, num_top)
    out = _launch(logits, token_ids, found)
    return TokenLogprobs(out.token_ids[:, : 1 + num_top], out.logprobs[:, : 1 + num_top], out.ranks)


def _launch(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    (num_rows, vocab_size), device = logits.shape, logits.device
    out = TokenLogprobs(
        torch.empty((num_rows, 1 + num_top), dtype=torch.int32, device=device),
        torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if num_rows == 0:
        return out
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    # Two allocations, as in `sampling.find_kept`.
    maxima, sums = (torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device) for _ in range(2))
    above = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    top = torch.empty((num_rows, num_chunks, num_top), dtype=torch.int64, device=device)
    parts = (maxima, sums, above, top)
    chunk_logprobs_kernel[(num_rows, num_chunks)](
        logits,
        token_ids,
        *parts,
        vocab_size,
        logits.stride(0),
        NUM_TOP=num_top,
        BLOCK=CHUNK_TOKENS,
        num_warps=NUM_WARPS,
    )
    row_logprobs_kernel[(num_rows,)](
        logits,
        token_ids,
        *parts,
        *out,
        num_chunks,
        logits.stride(0),
        NUM_TOP=num_top,
        CHUNKS=power_of_two(num_chunks),
        CANDIDATES=power_of_two(max(1, num_chunks * num_top)),
        num_warps=NUM_WARPS,
    )
    return out
