"""What `blocks.skips` declares, in a CPU program."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks.skips import Copies, KeptColumns, Mean
from headrace.kernels.cpu.facade import Buffer, write_scale_columns


@dataclass(frozen=True)
class CpuCopies:
    """`Copies`."""

    count: int

    @classmethod
    def read(cls, weights: CpuWeights, declared: Copies, prefix: str) -> CpuCopies:
        return cls(declared.count)

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        out = ops.room(self.count * x.columns, torch.float32)
        for index in range(self.count):
            ops.builder.copy(x, out.part(index * x.columns, x.columns))
        return out


@dataclass(frozen=True)
class CpuKeptColumns:
    """`KeptColumns`."""

    first: int

    @classmethod
    def read(cls, weights: CpuWeights, declared: KeptColumns, prefix: str) -> CpuKeptColumns:
        return cls(declared.first)

    def write(self, ops: ProgramOps, columns: Buffer, x: Buffer) -> Buffer:
        ops.builder.copy(x, columns.part(self.first, x.columns))
        return columns


@dataclass(frozen=True)
class CpuMean:
    """`Mean`."""

    share: float

    @classmethod
    def read(cls, weights: CpuWeights, declared: Mean, prefix: str) -> CpuMean:
        return cls(declared.share)

    def write(self, ops: ProgramOps, x: Buffer, y: Buffer) -> Buffer:
        write_scale_columns(ops.builder, x, torch.full((x.columns,), 1.0 - self.share), x)
        ops.builder.add(y, x, self.share)
        return x
