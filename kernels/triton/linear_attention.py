"""Linear attention with states that decay, token by token: gated delta rule, its form with a decay for each channel of
a key, and lightning attention. A program has a few columns of one head's state in its registers, through all tokens of
a sequence in the step, as in `scan.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.linear_attention import UNIT_EPS, LinearAttentionParams
from headrace.kernels.reference.states import LayerState, StateBatch
from headrace.kernels.triton.common import rounded
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.states import (
    STEP,
    end_of_part,
    input_at,
    keep_drafts,
    number_at,
    sigmoid,
    softplus,
    step_arguments,
    unit_arguments,
    unit_at,
)

TILE_ELEMENTS = 2048
"""Of a state, in the registers of one program."""
NUM_WARPS = 4


def linear_attention(
    mixed: Tensor,
    decays: Tensor | None,
    rates: Tensor | None,
    params: LinearAttentionParams,
    batch: StateBatch,
    state: LayerState,
) -> Tensor:
    """As `reference.linear_attention`."""
    mixed = mixed if mixed.stride(1) == 1 else mixed.contiguous()
    decays, rates = (None if x is None else x if x.stride(1) == 1 else x.contiguous() for x in (decays, rates))
    heads, value_dim = params.num_heads, params.value_dim
    out = torch.empty((len(mixed), heads * value_dim), dtype=mixed.dtype, device=mixed.device)
    keys = power_of_two(params.key_dim)
    tile = min(power_of_two(value_dim), max(1, TILE_ELEMENTS // keys))
    has_decays = decays is not None and params.decay_bias is not None
    linear_attention_kernel[(len(batch.rows), heads, -(-value_dim // tile))](
        mixed,
        decays if has_decays else None,
        rates,
        params.key_of_head,
        params.decay,
        params.decay_bias if has_decays else None,
        out,
        state.drafted,
        *unit_arguments(state.kept["state"]),
        *step_arguments(batch),
        mixed.stride(0),
        decays.stride(0) if decays is not None else 0,
        rates.stride(0) if rates is not None else 0,
        state.drafted.stride(0),
        state.drafted.stride(1),
        params.first_draft_element,
        float(params.correction),
        float(params.scale),
        float(params.decay_floor),
        UNIT_EPS,
        HEADS=heads,
        KEY_HEADS=params.num_key_heads,
        KEY_DIM=params.key_dim,
        VALUE_DIM=value_dim,
        DECAYS=decays.shape[1] // heads if decays is not None else 0,
        UNIT_KEYS=params.unit_keys,
        FLOOR=params.decay_floor != 0,
        TILE=tile,
        BLOCK=keys,
        num_warps=NUM_WARPS,
    )
    first = params.first_draft_element
    for each in (mixed, decays, rates):
        if each is not None:
            keep_drafts(each, first, batch, state.drafted)
            first += each.shape[1]
    return out


@triton.jit(do_not_specialize=STEP)
def linear_attention_kernel(
    mixed,  # [num_tokens, mixed_stride]: each key head's query, each one's key, each head's value
    decays,  # [num_tokens, decays_stride], or None: a head's decay is the same for all tokens
    rates,  # [num_tokens, rates_stride], or None: values are not corrected
    key_of_head,  # [HEADS] int64
    decay,  # [HEADS] float32, negative
    decay_bias,  # [HEADS * DECAYS] float32, or None without decays
    out,  # [num_tokens, HEADS * VALUE_DIM]
    drafted,  # [rows, drafts, elements] float32: mixed, decays and rates from first_element on
    memory,  # [pages, page_elements]: unit i is head i, [KEY_DIM, VALUE_DIM]
    unit_pages,  # [HEADS] int64
    unit_offsets,
    page_elements,
    query_start,
    rows,
    pages,
    sources,
    has_source,
    replayed,
    committed,
    snapshot_start,
    snapshot_ends,
    snapshot_pages,
    page_stride,
    flag_stride,
    mixed_stride,
    decays_stride,
    rates_stride,
    row_stride,
    draft_stride,
    first_element,
    correction,
    scale,
    decay_floor,
    unit_eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_seqs, HEADS, tiles of VALUE_DIM)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    values = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = values < VALUE_DIM
    keys = tl.arange(0, BLOCK)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    MIXED: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    begin = tl.load(query_start + seq).to(tl.int64)
    count = (tl.load(query_start + seq + 1) - begin).to(tl.int32)
    num_replayed = tl.load(replayed + seq * flag_stride)
    num_committed = tl.load(committed + seq * flag_stride)
    own_mixed = mixed + begin * mixed_stride
    drafts = drafted + tl.load(rows + seq).to(tl.int64) * row_stride + first_element
    q_at = (tl.load(key_of_head + head) * KEY_DIM).to(tl.int32)
    k_at = q_at + KEYS
    v_at = 2 * KEYS + head * VALUE_DIM
    rate = tl.load(decay + head)
    share = tl.exp(rate)
    by_key = tl.zeros([BLOCK], tl.float32)
    if DECAYS == 1:
        bias = tl.load(decay_bias + head)
    elif DECAYS:
        biases = tl.load(decay_bias + head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    elements = keys[:, None] * VALUE_DIM + values[None, :]
    whole = (keys < KEY_DIM)[:, None] & inside[None, :]
    held = tl.zeros([BLOCK, TILE], tl.float32)
    if tl.load(has_source + seq * flag_stride) != 0:
        source = unit_at(memory, unit_pages, unit_offsets, page_elements, sources + seq * page_stride, head)
        held = tl.load(source + elements, mask=whole, other=0.0).to(tl.float32)
    passed = num_replayed * 0
    last = tl.load(snapshot_start + seq + 1)
    own_end = num_replayed + num_committed
    # To the end of each snapshot, then to that of the row's own state, then through the drafts.
    for part in range(tl.load(snapshot_start + seq), last + 2):
        end, into = end_of_part(
            part, last, own_end, snapshot_ends, snapshot_pages, flag_stride, pages, page_stride, seq
        )
        if part > last:
            end = num_replayed + count
        for index in range(passed, end):
            k = input_at(
                index, num_replayed, own_mixed + k_at, mixed_stride, drafts + k_at, draft_stride, keys, KEY_DIM
            )
            added = input_at(
                index, num_replayed, own_mixed + v_at, mixed_stride, drafts + v_at, draft_stride, values, VALUE_DIM
            )
            if UNIT_KEYS:
                k = k * tl.rsqrt(tl.sum(k * k, 0) + unit_eps)
            if DECAYS == 1:
                step = bias + number_at(
                    index,
                    num_replayed,
                    decays + begin * decays_stride + head,
                    decays_stride,
                    drafts + MIXED + head,
                    draft_stride,
                )
                if FLOOR:
                    share = tl.exp(decay_floor * sigmoid(-rate * step))
                else:
                    share = tl.exp(rate * softplus(step))
                held = share * held
            elif DECAYS:
                by_key = biases + input_at(
                    index,
                    num_replayed,
                    decays + begin * decays_stride + head * KEY_DIM,
                    decays_stride,
                    drafts + MIXED + head * KEY_DIM,
                    draft_stride,
                    keys,
                    KEY_DIM,
                )
                if FLOOR:
                    by_key = tl.exp(decay_floor * sigmoid(-rate * by_key))
                else:
                    by_key = tl.exp(rate * softplus(by_key))
                held = by_key[:, None] * held
            else:
                held = share * held
            if rates is not None:
                corrected = correction * sigmoid(
                    number_at(
                        index,
                        num_replayed,
                        rates + begin * rates_stride + head,
                        rates_stride,
                        drafts + MIXED + HEADS * DECAYS + head,
                        draft_stride,
                    )
                )
                added = corrected * (added - tl.sum(held * k[:, None], 0))
            held = held + k[:, None] * added[None, :]
            if index >= num_replayed:
                token = begin + (index - num_replayed)
                q = tl.load(mixed + token * mixed_stride + q_at + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
                if UNIT_KEYS:
                    q = q * tl.rsqrt(tl.sum(q * q, 0) + unit_eps)
                y = tl.sum(held * (q * scale)[:, None], 0)
                target = out + token * (HEADS * VALUE_DIM) + head * VALUE_DIM + values
                tl.store(target, rounded(y, out.dtype.element_ty), mask=inside)
        passed = tl.maximum(passed, end)
        if (part <= last) & (end >= 0):
            tl.debug_barrier()  # all threads have read the state, which may be in these pages
            at = unit_at(memory, unit_pages, unit_offsets, page_elements, into, head)
            tl.store(at + elements, rounded(held, memory.dtype.element_ty), mask=whole)
