"""Log-probabilities of the sampled token and of the likeliest ones."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference import sampling as reference_sampling
from headrace.kernels.reference.sampling import TokenLogprobs
from headrace.kernels.triton.common import ordered, value_of
from headrace.kernels.triton.configs import power_of_two

CHUNK_TOKENS = 2048
NUM_WARPS = 4
MOST_TOP = 32
"""For more than this many, torch's top-k finds the likeliest, which does not wait for the device either."""
COMPILED_TOPS = (0, 8, MOST_TOP)
"""The values of num_top that kernels are compiled for. Others use the next larger and drop the rest, since a new value
would be compiled while serving."""
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
NO_KEY = tl.constexpr(-0x8000000000000000)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """As `reference.sampling.token_logprobs`, in two launches."""
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


@triton.jit
def chunk_logprobs_kernel(
    logits,  # [num_rows, vocab_size] float32
    token_ids,  # [num_rows]: the tokens whose rank is asked for
    chunk_max,  # [num_rows, num_chunks] float32
    chunk_sum,  # [num_rows, num_chunks] float32: of exp(logit - chunk_max)
    chunk_above,  # [num_rows, num_chunks] int32: tokens with a higher logit than the row's own
    chunk_top,  # [num_rows, num_chunks, NUM_TOP] int64 keys of the likeliest, with NUM_TOP
    vocab_size,
    row_stride,
    NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, num_chunks), BLOCK tokens each. A key is `ordered(logit) << 32 | 0xFFFFFFFF - token`."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=NEGATIVE_INFINITY)
    own = tl.load(logits + row * row_stride + tl.load(token_ids + row).to(tl.int64))
    place = row * tl.num_programs(1) + chunk
    highest = tl.max(values, 0)
    shift = tl.where(highest == NEGATIVE_INFINITY, 0.0, highest)
    tl.store(chunk_max + place, highest)
    tl.store(chunk_sum + place, tl.sum(tl.exp(values - shift), 0))
    tl.store(chunk_above + place, tl.sum((values > own).to(tl.int32), 0))
    if NUM_TOP:
        keys = (ordered(values).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
        keys = tl.where(inside, keys, NO_KEY)
        for number in range(NUM_TOP):
            largest = tl.max(keys, 0)
            tl.store(chunk_top + place * NUM_TOP + number, largest)
            keys = tl.where(keys == largest, NO_KEY, keys)


@triton.jit
def row_logprobs_kernel(
    logits,  # [num_rows, vocab_size] float32
    token_ids,  # [num_rows]
    chunk_max,  # as in `chunk_logprobs_kernel`
    chunk_sum,
    chunk_above,
    chunk_top,
    ids_out,  # [num_rows, 1 + NUM_TOP] int32
    logprobs_out,  # [num_rows, 1 + NUM_TOP] float32
    ranks_out,  # [num_rows] int32
    num_chunks,
    row_stride,
    NUM_TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    highest = tl.load(chunk_max + row * num_chunks + chunks, mask=inside, other=NEGATIVE_INFINITY)
    sums = tl.load(chunk_sum + row * num_chunks + chunks, mask=inside, other=0.0)
    most = tl.max(highest, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp(highest - most), 0)) + most
    token = tl.load(token_ids + row).to(tl.int64)
    own = tl.load(logits + row * row_stride + token)
    target = row * (NUM_TOP + 1)
    tl.store(ids_out + target, token.to(tl.int32))
    tl.store(logprobs_out + target, own - log_sum)
    above = tl.load(chunk_above + row * num_chunks + chunks, mask=inside, other=0)
    tl.store(ranks_out + row, tl.sum(above, 0) + 1)
    if NUM_TOP:
        places = tl.arange(0, CANDIDATES)
        count = num_chunks * NUM_TOP
        keys = tl.load(chunk_top + row * count + places, mask=places < count, other=NO_KEY)
        for number in range(NUM_TOP):
            largest = tl.max(keys, 0)
            tl.store(ids_out + target + 1 + number, (0xFFFFFFFF - (largest & 0xFFFFFFFF)).to(tl.int32))
            tl.store(logprobs_out + target + 1 + number, value_of((largest >> 32).to(tl.int32)) - log_sum)
            keys = tl.where(keys == largest, NO_KEY, keys)
