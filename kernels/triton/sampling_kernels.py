"""Choosing tokens on the device: chunk by chunk, with each row's truncation found by a search over its values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.common_kernels import ordered

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def mix(word):
    """SplitMix64's finaliser on uint64."""
    word ^= word >> 30
    word *= 0xBF58476D1CE4E5B9
    word ^= word >> 27
    word *= 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def row_key(seed, position):
    """uint64, as `reference_sampling.choose_tokens` defines it."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return mix(seed.to(tl.uint64, bitcast=True) + golden * (position.to(tl.uint64) + 1))


@triton.jit
def words_of(key, ids):
    """uint64 for token ids of any shape."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return mix(key + golden * (ids.to(tl.uint64) + 1))


@triton.jit
def exact_noise(word):
    """float64 Gumbel noise."""
    uniform = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def rough_noise(word):
    """The same in float32, to about 1e-5."""
    uniform = ((word >> 12).to(tl.float32) + 0.5) * 2.220446049250313e-16
    # Near 1 the logarithm needs the distance to 1, which float32 has only if it is taken before rounding.
    rest = ((word ^ 0xFFFFFFFFFFFFFFFF) >> 12).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * (0.25 + rest * 0.2))))
    return -tl.log(tl.where(rest < 0.0625, series, -tl.log(uniform)))


@triton.jit
def chunk_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    kept_keys,  # [num_rows] int32, with TRUNCATED: `ordered` of the last logit kept, after tempering
    kept_ids,  # [num_rows] int32, with TRUNCATED: the last token kept of those with that logit
    chunk_best,  # [num_rows, num_chunks] float32: the highest logit, NaN where there is one
    chunk_best_ids,  # [num_rows, num_chunks] int32: the first token with it
    chunk_scores,  # [num_rows, num_chunks] float64, with DRAW: the highest sum of tempered logit and noise
    chunk_drawn,  # [num_rows, num_chunks] int32, with DRAW: its token
    vocab_size,
    row_stride,
    DRAW: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, num_chunks), BLOCK tokens each."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=NEGATIVE_INFINITY)
    place = row * tl.num_programs(1) + chunk
    best = tl.max(values, 0)
    is_nan = tl.max((values != values).to(tl.int32), 0) > 0
    tl.store(chunk_best + place, tl.where(is_nan, float("nan"), best))
    is_best = tl.where(is_nan, values != values, values == best)
    tl.store(chunk_best_ids + place, tl.min(tl.where(is_best, ids, 0x7FFFFFFF), 0))
    if DRAW:
        temperature = tl.load(temperatures + row)
        best_score = tl.full([], NEGATIVE_INFINITY, tl.float64)
        best_id = chunk * BLOCK
        may_draw = temperature > 0
        if TRUNCATED:
            # Of most chunks nothing is kept.
            may_draw &= ordered(tl.div_rn(best, temperature)) >= tl.load(kept_keys + row)
        if may_draw:
            tempered = tl.div_rn(values, temperature + tl.zeros_like(values))
            kept = inside
            if TRUNCATED:
                keys, last_key = ordered(tempered), tl.load(kept_keys + row)
                kept &= (keys > last_key) | ((keys == last_key) & (ids <= tl.load(kept_ids + row)))
            words = words_of(row_key(tl.load(seeds + row), tl.load(positions + row)), ids)
            rough = tl.where(kept, tempered + rough_noise(words), NEGATIVE_INFINITY)
            highest = tl.max(rough, 0)
            # float64 logarithms are dear: only for what float32 cannot tell from the highest, mostly one token.
            near = (rough >= highest - (1e-3 + 1e-6 * tl.abs(highest))) & (rough > NEGATIVE_INFINITY)
            left = tl.sum(near.to(tl.int32), 0)
            while left > 0:
                candidate = tl.min(tl.where(near, ids, 0x7FFFFFFF), 0)
                is_candidate = ids == candidate
                logit = tl.max(tl.where(is_candidate, tempered, NEGATIVE_INFINITY), 0)
                word = words_of(row_key(tl.load(seeds + row), tl.load(positions + row)), candidate)
                score = logit.to(tl.float64) + exact_noise(word)
                best_id = tl.where(score > best_score, candidate, best_id)
                best_score = tl.maximum(score, best_score)
                near = near & (ids != candidate)
                left -= 1
        tl.store(chunk_scores + place, best_score)
        tl.store(chunk_drawn + place, best_id)


@triton.jit
def pick_kernel(
    temperatures,  # [num_rows] float32
    chunk_best,  # [num_rows, num_chunks] float32; the rest as in `chunk_kernel`
    chunk_best_ids,
    chunk_scores,
    chunk_drawn,
    token_ids,  # [num_rows] int64
    best_out,  # [num_rows] float32
    num_chunks,
    DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of a row's chunks. Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    place = row * num_chunks + chunks
    values = tl.load(chunk_best + place, mask=inside, other=NEGATIVE_INFINITY)
    is_nan = tl.max((values != values).to(tl.int32), 0) > 0
    best = tl.max(values, 0)
    is_best = inside & tl.where(is_nan, values != values, values == best)
    best_ids = tl.load(chunk_best_ids + place, mask=is_best, other=0x7FFFFFFF)
    token = tl.min(best_ids, 0)
    if DRAW:
        scores = tl.load(chunk_scores + place, mask=inside, other=NEGATIVE_INFINITY)
        drawn = tl.load(chunk_drawn + place, mask=inside & (scores == tl.max(scores, 0)), other=0x7FFFFFFF)
        token = tl.where(tl.load(temperatures + row) > 0, tl.min(drawn, 0), token)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(best_out + row, tl.where(is_nan, float("nan"), best))
