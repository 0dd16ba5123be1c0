"""Short convolutions: each channel of a token's result reads a few inputs, the last ones of its sequence.

A step of one token of each sequence is one launch, whose programs compute a sequence's token and keep its inputs. In
other steps programs compute tiles of tokens, and a second launch keeps the inputs, once all have been read: a
sequence's pages are read and written by one step. Every token's sum is the same, however tokens are divided.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.states import ConvolveParams, LayerState, StateBatch
from headrace.kernels.triton.common import rounded, sequence_of_tile
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.states import STEP, end_of_part, step_arguments, unit_arguments, unit_at

TILE_TOKENS = 16
BLOCK = 128
NUM_WARPS = 4


def convolve(x: Tensor, params: ConvolveParams, batch: StateBatch, state: LayerState) -> Tensor:
    """As `reference.states.convolve`."""
    channels, width = params.weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    num_seqs, drafted = len(batch.rows), state.drafted[:, :, params.first_draft_element :]

    def launch(programs: int, tokens: int, *, computes: bool, stores: bool) -> None:
        convolve_kernel[(programs, -(-channels // BLOCK))](
            x,
            params.weight,
            params.bias,
            out,
            drafted,
            *unit_arguments(state.kept[params.history]),
            *step_arguments(batch),
            num_seqs,
            channels,
            x.stride(0),
            state.drafted.stride(0),
            state.drafted.stride(1),
            WIDTH=width,
            TAPS=power_of_two(width - 1),
            GATED=params.gated,
            SILU=params.activation == "silu",
            TOKENS=tokens,
            BLOCK=BLOCK,
            COMPUTES=computes,
            STORES=stores,
            num_warps=NUM_WARPS,
        )

    if batch.max_query_len == 1:
        launch(num_seqs, 1, computes=True, stores=True)
    else:
        launch(len(x) // TILE_TOKENS + num_seqs, TILE_TOKENS, computes=True, stores=False)
        launch(num_seqs, TILE_TOKENS, computes=False, stores=True)
    return out


@triton.jit
def inputs_from(
    first,
    channels,
    inside,
    x,  # of the sequence's first token
    count,
    x_stride,
    size,
    memory,
    unit_pages,
    unit_offsets,
    page_elements,
    source,
    has_source,
    drafts,  # of the sequence
    replayed,
    draft_stride,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Inputs [first, first + NUM) of a sequence, [NUM, BLOCK] float32: the last WIDTH - 1 before the step, replayed
    drafts, then this step's tokens; zeros after them."""
    index = first + tl.arange(0, NUM)
    token = index - (WIDTH - 1) - replayed
    inside_of_step = ((token >= 0) & (token < count))[:, None] & inside[None, :]
    at = x + token.to(tl.int64)[:, None] * x_stride + channels[None, :]
    values = tl.load(at, mask=inside_of_step, other=0.0).to(tl.float32)
    if GATED:
        values *= tl.load(at + 2 * size, mask=inside_of_step, other=0.0).to(tl.float32)
    if first < WIDTH - 1 + replayed:  # few programs; of the three parts that are added, two are zeros
        is_past = index < WIDTH - 1
        past = unit_at(memory, unit_pages, unit_offsets, page_elements, source, tl.where(is_past, index, 0))
        inside_past = (index < tl.where(has_source != 0, WIDTH - 1, 0))[:, None] & inside[None, :]
        values += tl.load(past[:, None] + channels[None, :], mask=inside_past, other=0.0).to(tl.float32)
        draft = index - (WIDTH - 1)
        inside_drafts = ((draft >= 0) & (draft < replayed))[:, None] & inside[None, :]
        values += tl.load(
            drafts + draft.to(tl.int64)[:, None] * draft_stride + channels[None, :], mask=inside_drafts, other=0.0
        )
    return values


@triton.jit(do_not_specialize=[*STEP, "num_seqs"])
def convolve_kernel(
    x,  # [num_tokens, x_stride]: size columns, or with GATED three times as many: b, c, x
    weight,  # [size, WIDTH] float32
    bias,  # [size] float32 or None
    out,  # [num_tokens, size]
    drafted,  # [rows, drafts, elements] float32, the first `size` of which are kept here
    memory,  # [pages, page_elements]: unit i is the input WIDTH - 1 - i tokens before, [size]
    unit_pages,  # [WIDTH - 1] int64
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
    num_seqs,
    size,
    x_stride,
    row_stride,
    draft_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTES: tl.constexpr,
    STORES: tl.constexpr,
):
    """Grid (tiles of tokens, or with STORES num_seqs; blocks of channels)."""
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < size
    if STORES:
        seq = tl.program_id(0)
        begin = tl.load(query_start + seq).to(tl.int64)
        count = (tl.load(query_start + seq + 1) - begin).to(tl.int32)
        first = 0
    else:
        index = tl.program_id(0)
        seq = sequence_of_tile(query_start, num_seqs, index, TOKENS)
        begin = tl.load(query_start + seq).to(tl.int64)
        count = (tl.load(query_start + seq + 1) - begin).to(tl.int32)
        first = ((index - begin // TOKENS - seq) * TOKENS).to(tl.int32)
        if first >= count:
            return
    num_replayed = tl.load(replayed + seq * flag_stride)
    has = tl.load(has_source + seq * flag_stride)
    source = sources + seq * page_stride
    own_x = x + begin * x_stride
    drafts = drafted + tl.load(rows + seq).to(tl.int64) * row_stride
    if COMPUTES:
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            tapped = inputs_from(
                num_replayed + first + tap,
                channels,
                inside,
                own_x,
                count,
                x_stride,
                size,
                memory,
                unit_pages,
                unit_offsets,
                page_elements,
                source,
                has,
                drafts,
                num_replayed,
                draft_stride,
                TOKENS,
                WIDTH,
                GATED,
            )
            by_tap = tl.load(weight + channels * WIDTH + tap, mask=inside, other=0.0)
            total = tl.fma(tl.broadcast_to(by_tap[None, :], [TOKENS, BLOCK]), tapped, total)
        if bias is not None:
            total += tl.load(bias + channels, mask=inside, other=0.0)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tokens = first + tl.arange(0, TOKENS)
        wanted = (tokens < count)[:, None] & inside[None, :]
        if GATED:
            after = own_x + tokens.to(tl.int64)[:, None] * x_stride + size + channels[None, :]
            total *= tl.load(after, mask=wanted, other=0.0).to(tl.float32)
        target = out + (begin + tokens)[:, None] * size + channels[None, :]
        tl.store(target, rounded(total, out.dtype.element_ty), mask=wanted)
    if STORES:
        num_committed = tl.load(committed + seq * flag_stride)
        taps = tl.arange(0, TAPS)
        unit = tl.where(taps < WIDTH - 1, taps, 0)
        last = tl.load(snapshot_start + seq + 1)
        # The row's own pages last, after everything has been read that may be in them.
        for snapshot in range(tl.load(snapshot_start + seq), last + 1):
            end, into = end_of_part(
                snapshot,
                last,
                num_replayed + num_committed,
                snapshot_ends,
                snapshot_pages,
                flag_stride,
                pages,
                page_stride,
                seq,
            )
            if end >= 0:  # the same in all threads
                values = inputs_from(
                    end,
                    channels,
                    inside,
                    own_x,
                    count,
                    x_stride,
                    size,
                    memory,
                    unit_pages,
                    unit_offsets,
                    page_elements,
                    source,
                    has,
                    drafts,
                    num_replayed,
                    draft_stride,
                    TAPS,
                    WIDTH,
                    GATED,
                )
                tl.debug_barrier()
                at = unit_at(memory, unit_pages, unit_offsets, page_elements, into, unit)
                kept = (taps < WIDTH - 1)[:, None] & inside[None, :]
                tl.store(at[:, None] + channels[None, :], rounded(values, memory.dtype.element_ty), mask=kept)
        for draft in range(0, count - num_committed):
            values = inputs_from(
                WIDTH - 1 + num_replayed + num_committed + draft,
                channels,
                inside,
                own_x,
                count,
                x_stride,
                size,
                memory,
                unit_pages,
                unit_offsets,
                page_elements,
                source,
                has,
                drafts,
                num_replayed,
                draft_stride,
                1,
                WIDTH,
                GATED,
            )
            tl.store(drafts + draft * draft_stride + channels[None, :], values, mask=inside[None, :])
