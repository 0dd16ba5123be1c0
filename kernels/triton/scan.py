"""Mamba 2's recurrence, token by token: a program has a few rows of one head's state in its registers, through all
tokens of a sequence in the step. Decodes and prompts run the same operations in the same order, so results do not
depend on how tokens are divided among steps."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.states import LayerState, ScanParams, StateBatch
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


def scan(
    mixed: Tensor, steps: Tensor, gate: Tensor, params: ScanParams, batch: StateBatch, state: LayerState
) -> Tensor:
    """As `reference.states.scan`."""
    mixed, steps, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (mixed, steps, gate))
    out = torch.empty(gate.shape, dtype=mixed.dtype, device=mixed.device)
    size = power_of_two(params.state_size)
    tile = min(power_of_two(params.head_dim), max(1, TILE_ELEMENTS // size))
    scan_kernel[(len(batch.rows), params.num_heads, -(-params.head_dim // tile))](
        mixed,
        steps,
        gate,
        params.decay,
        params.skip,
        params.step_bias,
        out,
        state.drafted,
        *unit_arguments(state.kept["state"]),
        *step_arguments(batch),
        mixed.stride(0),
        steps.stride(0),
        gate.stride(0),
        state.drafted.stride(0),
        state.drafted.stride(1),
        params.first_draft_element,
        *params.step_limits,
        HEADS=params.num_heads,
        GROUPS=params.num_groups,
        HEAD_DIM=params.head_dim,
        STATE=params.state_size,
        TILE=tile,
        BLOCK=size,
        num_warps=NUM_WARPS,
    )
    keep_drafts(mixed, params.first_draft_element, batch, state.drafted)
    keep_drafts(steps, params.first_draft_element + mixed.shape[1], batch, state.drafted)
    return out


@triton.jit(do_not_specialize=STEP)
def scan_kernel(
    mixed,  # [num_tokens, mixed_stride]: each head's x, each group's B, each group's C
    steps,  # [num_tokens, steps_stride]
    gate,  # [num_tokens, gate_stride]
    decay,  # [HEADS] float32, negative
    skip,  # [HEADS] float32
    step_bias,  # [HEADS] float32
    out,  # [num_tokens, HEADS * HEAD_DIM]
    drafted,  # [rows, drafts, elements] float32: mixed and steps from first_element on
    memory,  # [pages, page_elements]: unit i is head i, [HEAD_DIM, STATE]
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
    steps_stride,
    gate_stride,
    row_stride,
    draft_stride,
    first_element,
    least_step,
    most_step,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_seqs, HEADS, tiles of HEAD_DIM)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = dims < HEAD_DIM
    across = tl.arange(0, BLOCK)
    INNER: tl.constexpr = HEADS * HEAD_DIM
    MIXED: tl.constexpr = INNER + 2 * GROUPS * STATE
    begin = tl.load(query_start + seq).to(tl.int64)
    count = (tl.load(query_start + seq + 1) - begin).to(tl.int32)
    num_replayed = tl.load(replayed + seq * flag_stride)
    num_committed = tl.load(committed + seq * flag_stride)
    own_mixed = mixed + begin * mixed_stride
    own_steps = steps + begin * steps_stride + head
    drafts = drafted + tl.load(rows + seq).to(tl.int64) * row_stride + first_element
    x_at = head * HEAD_DIM
    b_at = INNER + head // (HEADS // GROUPS) * STATE
    c_at = b_at + GROUPS * STATE
    rate = tl.load(decay + head)
    bias = tl.load(step_bias + head)
    kept_x = tl.load(skip + head)
    elements = dims[:, None] * STATE + across[None, :]
    whole = inside[:, None] & (across < STATE)[None, :]
    held = tl.zeros([TILE, BLOCK], tl.float32)
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
            x = input_at(
                index, num_replayed, own_mixed + x_at, mixed_stride, drafts + x_at, draft_stride, dims, HEAD_DIM
            )
            b = input_at(
                index, num_replayed, own_mixed + b_at, mixed_stride, drafts + b_at, draft_stride, across, STATE
            )
            raw = number_at(index, num_replayed, own_steps, steps_stride, drafts + MIXED + head, draft_stride)
            step = tl.minimum(tl.maximum(softplus(raw + bias), least_step), most_step)
            held = tl.exp(step * rate) * held + (step * x)[:, None] * b[None, :]
            if index >= num_replayed:
                token = begin + (index - num_replayed)
                c = tl.load(mixed + token * mixed_stride + c_at + across, mask=across < STATE, other=0.0)
                by_gate = tl.load(gate + token * gate_stride + x_at + dims, mask=inside, other=0.0).to(tl.float32)
                y = tl.sum(held * c.to(tl.float32)[None, :], 1) + kept_x * x
                y = y * (by_gate * sigmoid(by_gate))
                tl.store(out + token * INNER + x_at + dims, rounded(y, out.dtype.element_ty), mask=inside)
        passed = tl.maximum(passed, end)
        if (part <= last) & (end >= 0):
            tl.debug_barrier()  # all threads have read the state, which may be in these pages
            at = unit_at(memory, unit_pages, unit_offsets, page_elements, into, head)
            tl.store(at + elements, rounded(held, memory.dtype.element_ty), mask=whole)
