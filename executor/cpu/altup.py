"""Ops on several rows of hidden values of each token, and sparse gates, in a CPU program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks.altup import LEAST_SQUARE, CorrectedRows, OtherRows, ScaledColumns
from headrace.executor.models.blocks.gated_norm import SparseGate
from headrace.kernels.cpu.facade import (
    Buffer,
    write_correct_rows,
    write_like_rows,
    write_mix_rows,
    write_scale_columns,
    write_sparse_gate,
)


class _Plain:
    """An op without weights or numbers."""

    @classmethod
    def read(cls, *_: Any) -> Self:
        return cls()


class CpuTanh(_Plain):
    """`Tanh`."""

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        ops.builder.soft_cap(x, 1.0)
        return x


class CpuMixedRows(_Plain):
    """`MixedRows`."""

    def write(self, ops: ProgramOps, rows: Buffer, shares: Buffer) -> Buffer:
        out = ops.room(rows.columns, torch.float32)
        write_mix_rows(ops.builder, rows, shares, out)
        return out


@dataclass(frozen=True)
class CpuCorrectedRows:
    """`CorrectedRows`."""

    active: int

    @classmethod
    def read(cls, weights: CpuWeights, declared: CorrectedRows, prefix: str) -> CpuCorrectedRows:
        return cls(declared.active)

    def write(self, ops: ProgramOps, rows: Buffer, computed: Buffer, shares: Buffer) -> Buffer:
        out, rows = ops.room(rows.columns, torch.float32), ops.as_rows_of(computed, rows)
        write_correct_rows(ops.builder, rows, computed, shares, out, active=self.active)
        return out


@dataclass(frozen=True)
class CpuOtherRows:
    """`OtherRows`."""

    num_rows: int

    @classmethod
    def read(cls, weights: CpuWeights, declared: OtherRows, prefix: str) -> CpuOtherRows:
        return cls(declared.num_rows)

    def write(self, ops: ProgramOps, rows: Buffer, x: Buffer) -> Buffer:
        for index in range(1, self.num_rows):
            ops.builder.add(x, rows.part(index * x.columns, x.columns))
        return rows


class CpuFirstRows(_Plain):
    """`FirstRows`."""

    def write(self, ops: ProgramOps, first: Buffer, others: Buffer) -> Buffer:
        out = ops.room(first.columns + others.columns, torch.float32)
        ops.builder.copy(first, out.part(0, first.columns))
        write_like_rows(ops.builder, others, first, out.part(first.columns, others.columns), least=LEAST_SQUARE)
        return out


class CpuMeanRow(_Plain):
    """`MeanRow`."""

    def write(self, ops: ProgramOps, first: Buffer, *others: Buffer) -> Buffer:
        joined, out = ops.room(len(others) * first.columns, torch.float32), ops.room(first.columns, torch.float32)
        for index, each in enumerate(others):
            ops.builder.copy(each, joined.part(index * first.columns, first.columns))
        write_like_rows(ops.builder, joined, first, out, least=LEAST_SQUARE, adds=True)
        return out


@dataclass(frozen=True)
class CpuSparseGate:
    """A `SparseGate`."""

    declared: SparseGate

    @classmethod
    def read(cls, weights: CpuWeights, declared: SparseGate, prefix: str) -> CpuSparseGate:
        return cls(declared)

    def write(self, ops: ProgramOps, gate: Buffer, whole: Buffer, up: Buffer) -> Buffer:
        """whole: the gate itself, of the only rank."""
        declared, out = self.declared, ops.room(up.columns, ops.inner)
        write_sparse_gate(ops.builder, gate, up, out, cutoff=declared.cutoff, activation=declared.activation)
        return out


@dataclass(frozen=True)
class CpuScaledColumns:
    """`ScaledColumns` with their vector, float32."""

    factors: Tensor

    @classmethod
    def read(cls, weights: CpuWeights, declared: ScaledColumns, prefix: str) -> CpuScaledColumns:
        return cls(weights.values(declared.vector, prefix))

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        out = ops.room(x.columns, torch.float32)
        write_scale_columns(ops.builder, x, self.factors, out)
        return out
