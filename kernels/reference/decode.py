"""Gathers the inputs of a decode step from the rows' state on the device, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowsState:
    """The state of every row on the device. The last row is for padding: no request uses it, and its context stays
    empty."""

    block_tables: Tensor  # [num_groups, num_rows, max_blocks] int32
    last_token: Tensor  # [num_rows] int32
    num_computed: Tensor  # [num_rows] int32
    prompt_len: Tensor  # [num_rows] int32


class DecodeInputs(NamedTuple):
    """The inputs of a batch of rows that compute one token each."""

    rows: Tensor  # [size] int64
    token_ids: Tensor  # [size] int64
    positions: Tensor  # [size] int64
    slot_mapping: Tensor  # [num_groups, size] int64
    next_positions: Tensor  # [size] int64: position of the token to be sampled; 0 for padding
    seq_lens: Tensor  # [size] int32: the same values
    prompt_lens: Tensor  # [size] int32
    block_tables: Tensor  # [num_groups, size, num_blocks] int32


def decode_inputs(batch_rows: Tensor, state: RowsState, block_size: int, num_blocks: int) -> DecodeInputs:
    """Gathers the inputs of a decode step, and adds its token to the rows' `num_computed` in place.

    batch_rows: [size] int32, rows of the state, each at most once except the padding row; num_blocks: columns of the
    block tables to return.
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
