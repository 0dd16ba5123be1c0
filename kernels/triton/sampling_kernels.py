"""Choosing tokens on the device: chunk by chunk, with each row's truncation found by a search over its values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

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
def ordered(x):
    """float32 as int32 of the same order; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """What `ordered` took."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
        if temperature > 0:
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


@triton.jit
def count_and_mass(
    row_logits, temperature, first, low, step, least_key, vocab_size, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """For the three thresholds low + step, + 2 step, + 3 step: how many tokens (or what mass) are not below each.

    Thresholds are `ordered` keys as uint32 with the sign bit turned; tokens below least_key do not count. float64.
    """
    one = tl.zeros([], tl.float64)
    two = tl.zeros([], tl.float64)
    three = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        values = tl.load(row_logits + ids, mask=inside, other=NEGATIVE_INFINITY)
        tempered = tl.div_rn(values, temperature + tl.zeros_like(values))
        signed = ordered(tempered)
        keys = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
        weights = tl.where(inside & (signed >= least_key), 1.0, 0.0)
        if MASS:
            weights *= tl.exp2((tempered - first) * 1.4426950408889634)
        one += tl.sum(tl.where(keys >= low + step, weights, 0.0), 0).to(tl.float64)
        two += tl.sum(tl.where(keys >= low + 2 * step, weights, 0.0), 0).to(tl.float64)
        three += tl.sum(tl.where(keys >= low + 3 * step, weights, 0.0), 0).to(tl.float64)
    return one, two, three


@triton.jit
def largest_key(row_logits, temperature, first, least_key, wanted, vocab_size, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest `ordered` key such that tokens not below it are `wanted` or more, and what those above it are.

    Two bits a turn, from the highest down.
    """
    low = tl.zeros([], tl.uint32)
    step = tl.full([], 0x40000000, tl.uint32)
    above = tl.zeros([], tl.float64)
    for _ in range(16):
        one, two, three = count_and_mass(row_logits, temperature, first, low, step, least_key, vocab_size, MASS, BLOCK)
        above = tl.where(three >= wanted, above, tl.where(two >= wanted, three, tl.where(one >= wanted, two, one)))
        turns = (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32) + (three >= wanted).to(tl.uint32)
        low += turns * step
        step = step >> 2
    return (low ^ 0x80000000).to(tl.int32, bitcast=True), above


@triton.jit
def threshold_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows]
    top_ps,  # [num_rows] float64 or float32
    min_ps,  # [num_rows] float64 or float32
    chunk_best,  # [num_rows, num_chunks] float32
    kept_keys,  # [num_rows] int32
    kept_ids,  # [num_rows] int32
    vocab_size,
    num_chunks,
    row_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What min_p, top_k and top_p keep of each row: a beginning of the total order. Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)
    last_key = tl.full([], -0x80000000, tl.int32)
    last_id = tl.full([], 0x7FFFFFFF, tl.int32)
    # How many of those with the last key are kept; more than there are keeps them all.
    of_last = tl.full([], 1e18, tl.float64)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row_logits = logits + row * row_stride
        chunks = tl.arange(0, CHUNKS)
        best = tl.load(chunk_best + row * num_chunks + chunks, mask=chunks < num_chunks, other=NEGATIVE_INFINITY)
        first = tl.div_rn(tl.max(best, 0), temperature)
        if min_p > 0:
            # The smallest float32 that is not below the exact bound: the nearest one or the next.
            bound = first.to(tl.float64) + tl.log(min_p)
            nearest = bound.to(tl.float32)
            last_key = ordered(nearest) + (nearest.to(tl.float64) < bound).to(tl.int32)
        above = tl.zeros([], tl.float64)
        if (top_k > 0) & (top_k < vocab_size):
            least_key = last_key
            found, above = largest_key(
                row_logits, temperature, first, least_key, top_k.to(tl.float64), vocab_size, False, BLOCK
            )
            # Where min_p leaves fewer than top_k, the search finds nothing and ends at the bottom.
            if found >= least_key:
                last_key = found
                of_last = top_k.to(tl.float64) - above
        if top_p < 1:
            heavier = tl.zeros([], tl.float64)
            ties = tl.zeros([], tl.float64)
            for start in range(0, vocab_size, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                inside = ids < vocab_size
                values = tl.load(row_logits + ids, mask=inside, other=NEGATIVE_INFINITY)
                tempered = tl.div_rn(values, temperature + tl.zeros_like(values))
                keys = ordered(tempered)
                weights = tl.exp2((tempered - first) * 1.4426950408889634)
                heavier += tl.sum(tl.where(inside & (keys > last_key), weights, 0.0), 0).to(tl.float64)
                ties += tl.sum((inside & (keys == last_key)).to(tl.float32), 0).to(tl.float64)
            last_weight = tl.exp2((value_of(last_key) - first) * 1.4426950408889634).to(tl.float64)
            last_weight = tl.where(ties > 0, last_weight, 0.0)
            # Never nothing, which no token at all would reach.
            wanted = tl.maximum(top_p * (heavier + tl.minimum(of_last, ties) * last_weight), 1e-300)
            if heavier >= wanted:
                found, above = largest_key(
                    row_logits, temperature, first, last_key + 1, wanted, vocab_size, True, BLOCK
                )
                last_key = found
                of_last = tl.full([], 1e18, tl.float64)
                heavier = above
                last_weight = tl.exp2((value_of(last_key) - first) * 1.4426950408889634).to(tl.float64)
            if last_weight > 0:
                of_last = tl.minimum(of_last, tl.maximum(tl.ceil((wanted - heavier) / last_weight), 1.0))
        # The id of the last one kept among equals.
        taken = tl.zeros([], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            values = tl.load(row_logits + ids, mask=inside, other=NEGATIVE_INFINITY)
            is_last = inside & (ordered(tl.div_rn(values, temperature + tl.zeros_like(values))) == last_key)
            count = tl.sum(is_last.to(tl.int32), 0).to(tl.float64)
            if (taken < of_last) & (taken + count >= of_last):
                numbers = tl.cumsum(is_last.to(tl.int32), 0)
                is_it = is_last & (numbers == (of_last - taken).to(tl.int32))
                last_id = tl.max(tl.where(is_it, ids, -1), 0)
            taken += count
    tl.store(kept_keys + row, last_key)
    tl.store(kept_ids + row, last_id)
