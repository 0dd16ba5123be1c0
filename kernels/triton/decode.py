"""Gathers the inputs of a decode step from the rows' state, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.decode import DecodeInputs, RowsState

BLOCK = 1024
NUM_WARPS = 4


def decode_inputs(batch_rows: Tensor, state: RowsState, block_size: int, num_blocks: int) -> DecodeInputs:
    """As `reference.decode.decode_inputs`."""
    size, device = len(batch_rows), batch_rows.device
    # One allocation each, since Triton compiles for the alignment of tensors.
    rows, token_ids, positions, following = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(4))
    seq_lens, prompt_lens = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
    num_groups = len(state.block_tables)
    # Strides that align the part of each group as well.
    slots_stride, tables_stride = -(-size // 2) * 2, -(-size * num_blocks // 4) * 4
    slots = torch.empty((num_groups, slots_stride), dtype=torch.int64, device=device)[:, :size]
    tables = torch.empty((num_groups, tables_stride), dtype=torch.int32, device=device)
    tables = tables[:, : size * num_blocks].unflatten(1, (size, num_blocks))
    found = DecodeInputs(rows, token_ids, positions, slots, following, seq_lens, prompt_lens, tables)
    decode_inputs_kernel[(size, -(-num_blocks // BLOCK))](
        batch_rows,
        state.block_tables,
        state.last_token,
        state.num_computed,
        state.prompt_len,
        *found,
        num_blocks,
        state.block_tables.stride(1),
        len(state.num_computed) - 1,
        num_groups,
        slots_stride,
        tables_stride,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return found


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "last_row", "num_groups", "slots_stride", "tables_stride"])
def decode_inputs_kernel(
    batch_rows,  # [size] int32
    block_table,  # [num_groups, last_row + 1, table_stride] int32
    last_token,  # [num_rows] int32, and the next two
    num_computed,
    prompt_len,
    rows_out,  # [size] int64, as the next four; what they are is in `reference_decode.DecodeInputs`
    token_ids,
    positions,
    slot_mapping,  # [num_groups, slots_stride]
    next_positions,
    seq_lens,  # [size] int32
    prompt_lens,  # [size] int32
    block_tables,  # [num_groups, tables_stride] int32, of each group [size, num_blocks]
    num_blocks,
    table_stride,
    last_row,  # which belongs to nobody
    num_groups,
    slots_stride,
    tables_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (size, ceil(num_blocks / BLOCK))."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(batch_rows + index).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_blocks
    position = tl.load(num_computed + row)
    for group in range(num_groups):
        table = block_table + (group * (last_row + 1) + row) * table_stride
        wanted = tl.load(table + columns, mask=inside, other=0)
        tl.store(block_tables + group * tables_stride + index * num_blocks + columns, wanted, mask=inside)
        if tl.program_id(1) == 0:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            tl.store(slot_mapping + group * slots_stride + index, block * BLOCK_SIZE + position % BLOCK_SIZE)
    if tl.program_id(1) == 0:
        following = position + (row < last_row).to(tl.int32)
        tl.store(rows_out + index, row)
        tl.store(token_ids + index, tl.load(last_token + row).to(tl.int64))
        tl.store(positions + index, position.to(tl.int64))
        tl.store(next_positions + index, following.to(tl.int64))
        tl.store(seq_lens + index, following)
        tl.store(prompt_lens + index, tl.load(prompt_len + row))
        # Only the last row is here more than once, and it stays where it is.
        tl.store(num_computed + row, following)
