"""Ops of a program in which the ranks of one model meet: each writes its part, and all read all parts.

Parts lie in memory that the ranks share. Sums take two turns of parts alternately, and a program ends with a meeting,
so that its next run may begin with the first turn; see collectives.h.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .collectives import GroupC, RankGatherArgs, RankSumArgs
from .program import ROW_COUNTS, Builder
from .program_parts import Buffer


class _MeetArgs(ctypes.Structure):
    _fields_ = (("group", ctypes.c_void_p),)


def rank_sum(builder: Builder, group: GroupC, parts: Tensor, out: Buffer, *, add: bool) -> None:
    """out (+)= the sum of the ranks' parts of a turn. parts: [ranks, max tokens, columns] float32, shared; this rank's
    own must have been written by the ops before."""
    if parts.dtype != torch.float32 or parts.shape[2] != out.columns or parts.shape[0] != group.size:
        raise ValueError(f"parts of {parts.dtype} {list(parts.shape)} cannot be summed into {out.columns} columns.")
    if parts.shape[1] != len(out.tensor) or not parts[0].is_contiguous():
        raise ValueError(f"parts of {parts.shape[1]} rows cannot be summed into {len(out.tensor)} rows.")
    args = RankSumArgs(
        group=ctypes.addressof(group),
        parts=parts.data_ptr(),
        part_stride=parts.stride(0),
        out=out.address,
        out_stride=out.stride,
        columns=out.columns,
        out_dtype=out.type,
        rows=ROW_COUNTS[out.rows],
        add=add,
    )
    own = Buffer(parts[group.rank], out.rows)
    builder.op("hr_op_rank_sum", args, (own, out) if add else (own,), (out,), keep=(group, parts))


def rank_gather(builder: Builder, group: GroupC, shared: Buffer, out: Buffer) -> None:
    """out = shared, of whose columns every rank has written its own. Ends with a meeting."""
    if shared.tensor.dtype != torch.float32 or shared.tensor.shape != out.tensor.shape or shared.type != out.type:
        raise ValueError(f"{list(shared.tensor.shape)} cannot be gathered into {list(out.tensor.shape)}.")
    args = RankGatherArgs(
        group=ctypes.addressof(group),
        shared=shared.address,
        out=out.address,
        columns=out.columns,
        rows=ROW_COUNTS[out.rows],
    )
    builder.op("hr_op_rank_gather", args, (shared,), (out,), keep=(group,))


def rank_meet(builder: Builder, group: GroupC, after: Buffer) -> None:
    """A meeting when `after` was written by the op before."""
    builder.op("hr_op_rank_meet", _MeetArgs(group=ctypes.addressof(group)), (after,), (after,), keep=(group,))
