"""Launching the gathering of a decode step's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.decode import DecodeInputs, RowsState
from headrace.kernels.triton.decode_kernels import decode_inputs_kernel

BLOCK = 1024
NUM_WARPS = 4


def decode_inputs(batch_rows: Tensor, state: RowsState, block_size: int, num_blocks: int) -> DecodeInputs:
    """As `reference_decode.decode_inputs`."""
    size, device = len(batch_rows), batch_rows.device
    # An allocation each: Triton compiles for how tensors are aligned.
    rows, token_ids, positions, following = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(4))
    seq_lens, prompt_lens = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
    num_groups = len(state.block_tables)
    # Each group's part is aligned as well.
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
