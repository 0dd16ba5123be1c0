"""What a decode step computes its tokens from, gathered from the state of its rows, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowsState:
    """What the device knows of each row. The last row belongs to nobody: it has no context, and never gets one."""

    block_tables: Tensor  # [num_groups, num_rows, max_blocks] int32
    last_token: Tensor  # [num_rows] int32
    num_computed: Tensor  # [num_rows] int32
    prompt_len: Tensor  # [num_rows] int32


class DecodeInputs(NamedTuple):
    """Of each row of a batch, which computes one token."""

    rows: Tensor  # [size] int64
    token_ids: Tensor  # [size] int64
    positions: Tensor  # [size] int64
    slot_mapping: Tensor  # [num_groups, size] int64
    next_positions: Tensor  # [size] int64: of the token that is chosen; a row of nobody stays at 0
    seq_lens: Tensor  # [size] int32: the same
    prompt_lens: Tensor  # [size] int32
    block_tables: Tensor  # [num_groups, size, num_blocks] int32


def decode_inputs(batch_rows: Tensor, state: RowsState, block_size: int, num_blocks: int) -> DecodeInputs:
    """Gathers them, and moves the rows' num_computed on by the token, in place.

    batch_rows: [size] int32, rows of the state, of which only the last may be there more than once; num_blocks: how
    many columns of the block tables are wanted.
    """
    rows = batch_rows.long()
    positions = state.num_computed[rows].long()
    tables = state.block_tables[:, rows, :num_blocks]
    blocks = tables[:, torch.arange(len(rows), device=rows.device), positions // block_size]
    next_positions = positions + (rows < len(state.num_computed) - 1)
    seq_lens = next_positions.int()
    state.num_computed[rows] = seq_lens
    return DecodeInputs(
        rows=rows,
        token_ids=state.last_token[rows].long(),
        positions=positions,
        slot_mapping=torch.add(positions % block_size, blocks, alpha=block_size),
        next_positions=next_positions,
        seq_lens=seq_lens,
        prompt_lens=state.prompt_len[rows],
        block_tables=tables,
    )


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"decode_inputs": decode_inputs})
