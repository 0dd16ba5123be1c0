"""Collective ops of a program, for tensor parallelism: each rank writes its part, and all ranks read all parts.

The parts are in memory that the ranks share. Sums alternate between two sets of parts, and a program ends with a
barrier of the ranks, so that its next run can begin with the first set; see collectives.h.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.kernels.cpu.program.parts import Buffer
from headrace.kernels.cpu.program.program import ROW_COUNTS, Builder
from headrace.kernels.cpu.runtime.collectives import GroupC, RankGatherArgs, RankSumArgs
from headrace.kernels.cpu.runtime.pointers import pointer


class _MeetArgs(ctypes.Structure):
    _fields_ = (("group", ctypes.c_void_p),)


def rank_sum(builder: Builder, group: GroupC, parts: Tensor, out: Buffer, *, add: bool) -> None:
    """All-reduce: out = (or, with add, +=) the sum of the ranks' parts. parts: [ranks, max tokens, columns] float32,
    shared; earlier ops must have written this rank's own."""
    if parts.dtype != torch.float32 or parts.shape[2] != out.columns or parts.shape[0] != group.size:
        raise ValueError(f"parts of {parts.dtype} {list(parts.shape)} cannot be summed into {out.columns} columns.")
    if parts.shape[1] != len(out.tensor) or not parts[0].is_contiguous():
        raise ValueError(f"parts of {parts.shape[1]} rows cannot be summed into {len(out.tensor)} rows.")
    args = RankSumArgs(
        group=ctypes.addressof(group),
        parts=pointer(parts),
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
    """All-gather: out = shared, in which every rank has written its own columns. Ends with a barrier of the ranks."""
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
    """A barrier of the ranks, after the ops that write `after`."""
    builder.op("hr_op_rank_meet", _MeetArgs(group=ctypes.addressof(group)), (after,), (after,), keep=(group,))
