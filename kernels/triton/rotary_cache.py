"""q/k norm, rotary and the cache write: one program per token and a few of its heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.attention import CacheScales, PagedBatch
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation
from headrace.kernels.triton.common import CACHE_KINDS, e4m3_of, e5m2_of, int8_of, rounded, scale_of
from headrace.kernels.triton.configs import power_of_two

ELEMENTS_PER_PROGRAM = 1024
NUM_WARPS = 4
NOTHING = Rotation()


def rotary_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    cache: LayerCache,
    batch: PagedBatch,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.rotary_cache.rotary_and_write`, in one launch. out: contiguous, with query's shape and dtype."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch((query, key, value), rotation, cache, batch, (out, None))
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.rotary`."""
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    _launch((query, key, None), Rotation(cos, sin), None, None, (outs[0], outs[1]))
    return outs[0], outs[1]


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scales: CacheScales | None = None,
) -> None:
    """As `reference.write_cache`."""
    no_query = key[:, :0]
    _launch((no_query, key, value), NOTHING, LayerCache(key_cache, value_cache, scales), batch, (no_query, None))


def _launch(
    heads: tuple[Tensor, Tensor, Tensor | None],
    rotation: Rotation,
    cache: LayerCache | None,
    batch: PagedBatch | None,
    outs: tuple[Tensor, Tensor | None],
) -> None:
    query, key, value = (None if x is None else _rows_of_heads(x) for x in heads)
    assert query is not None
    assert key is not None
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens == 0:
        return
    key_cache = value_cache = None
    scales, kind, block_size = CacheScales(), 0, 1
    if cache is not None:
        key_cache, value_cache, scales = cache.keys, cache.values, cache.scales or scales
        kind, block_size = CACHE_KINDS.get(key_cache.dtype, 0), key_cache.shape[2]
        if not key_cache.is_contiguous() or not value_cache.is_contiguous():
            raise ValueError("the key and value caches of a layer must each be contiguous")
        if kind > CACHE_KINDS[torch.int8]:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block_d = power_of_two(head_dim)
    at_once = max(1, ELEMENTS_PER_PROGRAM // block_d)
    grid = (num_tokens, -(-num_heads // at_once) - (-num_kv_heads // at_once))
    rotary_cache_kernel[grid](
        query,
        key,
        value,
        *outs,
        rotation.query_norm,
        rotation.key_norm,
        None if rotation.cos is None else rotation.cos.contiguous(),
        None if rotation.sin is None else rotation.sin.contiguous(),
        None if batch is None else batch.slot_mapping,
        key_cache,
        value_cache,
        scales.keys if kind else None,
        scales.values if kind else None,
        *scale_of(scales.key, kind, scales.keys),
        *scale_of(scales.value, kind, scales.values),
        rotation.eps,
        query.stride(0),
        key.stride(0),
        0 if value is None else value.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEADS=at_once,
        HALF=0 if rotation.cos is None else rotation.cos.shape[1],
        INTERLEAVED=rotation.interleaved,
        WRITE=cache is not None,
        BLOCK_SIZE=block_size,
        KIND=kind,
        ROW_SCALES=kind != 0 and scales.keys is not None,
        num_warps=NUM_WARPS,
    )


def _rows_of_heads(x: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim] with each token's heads contiguous; the stride of tokens is free."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] <= 1) else x.contiguous()


@triton.jit
def prepared(
    source,  # [HEADS, HEAD_DIM] of one token
    norm,  # [HEAD_DIM] float32 or None
    cos,  # [HALF] float32 of this token, with HALF
    sin,
    heads,
    in_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The heads normalised and rotated, [HEADS, BLOCK_D] float32 that the source's dtype holds exactly."""
    dtype = source.dtype.element_ty
    dims = tl.arange(0, BLOCK_D)
    elements = heads[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(source + elements, mask=in_heads[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0)
        x = rounded(x * factor * weight[None, :], dtype).to(tl.float32)
    if HALF:
        if INTERLEAVED:
            partners = dims ^ 1
            angles = dims // 2
            is_first = dims % 2 == 0
        else:
            partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
            angles = tl.where(dims < HALF, dims, dims - HALF)
            is_first = dims < HALF
        turns = dims < 2 * HALF
        # The partner is read again rather than moved between threads: its line is in the first-level cache.
        partner = tl.load(
            source + heads[:, None] * HEAD_DIM + partners[None, :], mask=in_heads[:, None] & turns[None, :], other=0.0
        ).to(tl.float32)
        if norm is not None:
            partner_weight = tl.load(norm + partners, mask=turns, other=0.0)
            partner = rounded(partner * factor * partner_weight[None, :], dtype).to(tl.float32)
        cosine = tl.load(cos + angles, mask=turns, other=1.0)[None, :]
        sine = tl.load(sin + angles, mask=turns, other=0.0)[None, :]
        turned = x * cosine + tl.where(is_first[None, :], -partner, partner) * sine
        x = tl.where(turns[None, :], rounded(turned, dtype).to(tl.float32), x)
    return x


@triton.jit
def store_rows(
    cache,
    scales,
    rows,  # [HEADS] rows of the cache seen as [num_blocks * num_kv_heads * block_size, HEAD_DIM]
    in_heads,
    x,  # [HEADS, BLOCK_D] float32
    scale,  # of all, or [HEADS, 1]; without ROW_SCALES
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    """KIND: 0 stores as it is, 1 int8, 2 e4m3 as bytes, 5 e5m2 as bytes."""
    dims = tl.arange(0, BLOCK_D)
    target = cache + rows[:, None] * HEAD_DIM + dims[None, :]
    inside = in_heads[:, None] & (dims < HEAD_DIM)[None, :]
    if KIND == 0:
        tl.store(target, rounded(x, cache.dtype.element_ty), mask=inside)
    else:
        most: tl.constexpr = 127.0 if KIND == 1 else 448.0 if KIND == 2 else 57344.0
        if ROW_SCALES:
            largest = tl.max(tl.abs(x), 1)
            divisor = tl.where(largest > 0, tl.div_rn(largest, tl.zeros_like(largest) + most), 1.0)
            divisor += tl.sum(x * 0.0, 1)  # NaN for a row that is not finite, so that what reads it is not either
            tl.store(scales + rows, divisor, mask=in_heads)
            small = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
        else:
            small = tl.div_rn(x, tl.zeros_like(x) + scale)
        small = tl.minimum(tl.maximum(small, -most), most)
        if KIND == 1:
            tl.store(target, int8_of(small), mask=inside)
        elif KIND == 5:
            tl.store(target, tl.where(x * 0.0 == 0.0, e5m2_of(small), 0x7F).to(tl.uint8), mask=inside)
        else:
            tl.store(target, tl.where(x * 0.0 == 0.0, e4m3_of(small), 0x7F).to(tl.uint8), mask=inside)


@triton.jit
def rotary_cache_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], a token's heads side by side; the same holds below
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], read with WRITE
    query_out,  # [num_tokens, NUM_HEADS, HEAD_DIM], contiguous
    key_out,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], contiguous, or None
    query_norm,  # [HEAD_DIM] float32 or None
    key_norm,
    cos,  # [num_tokens, HALF] float32, with HALF
    sin,
    slots,  # [num_tokens] int64, with WRITE
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache,
    key_scales,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE] float32 with ROW_SCALES
    value_scales,
    key_scale,
    key_heads,  # [NUM_KV_HEADS] float32, or None: divisors in place of the one of all
    value_scale,
    value_heads,
    eps,
    query_stride,
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    """Grid (num_tokens, programs for query heads, then those for key heads, which write values too)."""
    token = tl.program_id(0).to(tl.int64)
    QUERY_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    cos_row = cos
    sin_row = sin
    if HALF:
        cos_row = cos + token * HALF
        sin_row = sin + token * HALF
    if tl.program_id(1) < QUERY_PROGRAMS:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        in_heads = heads < NUM_HEADS
        x = prepared(
            query + token * query_stride,
            query_norm,
            cos_row,
            sin_row,
            heads,
            in_heads,
            eps,
            HEAD_DIM,
            BLOCK_D,
            HALF,
            INTERLEAVED,
        )
        target = query_out + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, rounded(x, query.dtype.element_ty), mask=in_heads[:, None] & in_dims[None, :])
    else:
        heads = (tl.program_id(1) - QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        in_heads = heads < NUM_KV_HEADS
        x = prepared(
            key + token * key_stride,
            key_norm,
            cos_row,
            sin_row,
            heads,
            in_heads,
            eps,
            HEAD_DIM,
            BLOCK_D,
            HALF,
            INTERLEAVED,
        )
        inside = in_heads[:, None] & in_dims[None, :]
        if key_out is not None:
            target = key_out + (token * NUM_KV_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, rounded(x, key.dtype.element_ty), mask=inside)
        if WRITE:
            slot = tl.load(slots + token).to(tl.int64)
            if slot >= 0:
                rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
                by_key = key_scale
                if key_heads is not None:
                    by_key = tl.load(key_heads + heads, mask=in_heads, other=1.0)[:, None]
                store_rows(key_cache, key_scales, rows, in_heads, x, by_key, HEAD_DIM, BLOCK_D, KIND, ROW_SCALES)
                source = value + token * value_stride + heads[:, None] * HEAD_DIM + dims[None, :]
                v = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                by_value = value_scale
                if value_heads is not None:
                    by_value = tl.load(value_heads + heads, mask=in_heads, other=1.0)[:, None]
                store_rows(value_cache, value_scales, rows, in_heads, v, by_value, HEAD_DIM, BLOCK_D, KIND, ROW_SCALES)
