"""Sampling of tokens, chunk by chunk; `truncation.py` finds each row's truncation by a search over its values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.sampling import DeviceChosen, DeviceDraws
from headrace.kernels.triton.common import ordered
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.truncation import part_kernel, threshold_kernel

CHUNK_TOKENS = 2048
PART_TOKENS = 64
"""Tokens of a part, whose highest logit and mass are stored. They bound what top_k keeps, up to the number of parts."""
CAPACITY = 8192
"""The most tokens above the bound that are gathered; in a row with more the whole row is searched."""
SEARCH_TOKENS = 1024
GATHER_TOKENS = 4096
NUM_WARPS = 4
TRUNCATED_REGISTERS = 104
"""Limit on the registers of a thread. Without it Triton 3.6's assembler limits itself to 96 and spills two."""
SEARCH_WARPS = 16
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


def choose_tokens(logits: Tensor, draws: DeviceDraws, out: DeviceChosen | None = None) -> DeviceChosen:
    """As `reference.sampling.choose_tokens`, with bitwise the same random words; out, if given, takes the result.

    Rows of logits may be strided. The masses of top_p are sums of float32 weights, exact to about 1e-6: a token closer
    to the limit than that may be kept or cut.
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
        **({"maxnreg": TRUNCATED_REGISTERS} if may_truncate else {}),
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
    """Finds the last token of each row that min_p, top_k and top_p keep.

    Returns the `ordered` bits of its logit after temperature, and its id: two [num_rows] int32. A row that nothing
    truncates is kept whole.
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
    # Two allocations: in one, the alignment that Triton compiles for would depend on the number of rows.
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
