"""Log-probabilities of the chosen token and of the likeliest ones."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.common_kernels import ordered, value_of

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
NO_KEY = tl.constexpr(-0x8000000000000000)


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
