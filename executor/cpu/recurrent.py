"""Layers that keep a state per sequence, and gates, in a CPU program: what they declare, with its weights, and the ops
that they write. A step changes the states that it reads, so none of these may be computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks import Declared
from headrace.executor.models.blocks.gated_norm import Added, GatedNorm, HeadNorms, JoinedColumns, OutputGate, SoftCap
from headrace.executor.models.blocks.linear_attention import PreparedHeads
from headrace.executor.models.blocks.shared_transformer import Halves, Sum
from headrace.executor.models.eager_states import (
    convolve_params,
    gated_lru_params,
    gated_norm_weight,
    head_norm_weights,
    linear_attention_params,
    scan_params,
    selective_params,
)
from headrace.kernels.cpu.facade import (
    Buffer,
    Norm,
    write_convolve,
    write_gated_lru,
    write_linear_attention,
    write_scan,
    write_selective_scan,
)
from headrace.kernels.reference.gated_lru import GatedLruParams
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.selective import SelectiveParams
from headrace.kernels.reference.states import ConvolveParams, ScanParams

P = TypeVar("P")


@dataclass(frozen=True)
class _StateOp(Generic[P]):
    """An op that reads and writes states, with what it needs of the weights."""

    params: P
    params_of: ClassVar[Callable[..., Any]]

    @classmethod
    def read(cls, weights: CpuWeights, declared: Declared, prefix: str) -> Self:
        return cls(cls.params_of(weights, declared, prefix))


class CpuConvolve(_StateOp[ConvolveParams]):
    """A `Convolve` with its weights."""

    params_of = staticmethod(convolve_params)

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        params = self.params
        # A gated result is a linear layer's input; the others are read by a scan.
        out = ops.room(len(params.weight), ops.inner if params.gated else torch.float32)
        write_convolve(ops.builder, x, out, params, ops.states, ops.state)
        return out


class CpuScan(_StateOp[ScanParams]):
    """A `Scan` with its vectors."""

    params_of = staticmethod(scan_params)

    def write(self, ops: ProgramOps, mixed: Buffer, steps: Buffer, gate: Buffer) -> Buffer:
        out = ops.room(gate.columns, torch.float32)
        write_scan(ops.builder, mixed, steps, gate, out, self.params, ops.states, ops.state)
        return out


@dataclass(frozen=True)
class CpuPreparedHeads:
    """`PreparedHeads` with the constants of their norms."""

    declared: PreparedHeads
    norms: tuple[Norm | None, Norm | None]
    """Of queries and of keys."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: PreparedHeads, prefix: str) -> CpuPreparedHeads:
        query, key = (
            None if norm is None else weights.norm(norm, prefix).constants
            for norm in (declared.query_norm, declared.key_norm)
        )
        return cls(declared, (query, key))

    def write(self, ops: ProgramOps, mixed: Buffer) -> Buffer:
        columns, rotary = mixed.columns // 3, ops.rotary(self.declared.rope)
        for index, norm in enumerate(self.norms):
            ops.builder.prepare_heads(mixed.part(index * columns, columns), self.declared.head_dim, rotary, norm)
        return mixed


class CpuLinearAttention(_StateOp[LinearAttentionParams]):
    """A `LinearAttention` with its vectors."""

    params_of = staticmethod(linear_attention_params)

    def write(
        self, ops: ProgramOps, mixed: Buffer, decays: Buffer | None = None, rates: Buffer | None = None
    ) -> Buffer:
        out = ops.room(self.params.num_heads * self.params.value_dim, torch.float32)
        write_linear_attention(ops.builder, mixed, decays, rates, out, self.params, ops.states, ops.state)
        return out


class CpuSelectiveScan(_StateOp[SelectiveParams]):
    """A `SelectiveScan` with its decays."""

    params_of = staticmethod(selective_params)

    def write(self, ops: ProgramOps, x: Buffer, steps: Buffer, shared: Buffer, gate: Buffer) -> Buffer:
        out = ops.room(x.columns, ops.inner)
        inputs = {"x": x, "steps": steps, "shared": shared, "gate": gate}
        write_selective_scan(ops.builder, inputs, out, self.params, ops.states, ops.state)
        return out


class CpuLru(_StateOp[GatedLruParams]):
    """An `Lru` with its gates."""

    params_of = staticmethod(gated_lru_params)

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        out = ops.room(x.columns, torch.float32)
        write_gated_lru(ops.builder, x, out, self.params, ops.states, ops.state)
        return out


@dataclass(frozen=True)
class CpuGatedNorm:
    """A `GatedNorm` with its weight, float32."""

    declared: GatedNorm
    weight: Tensor

    @classmethod
    def read(cls, weights: CpuWeights, declared: GatedNorm, prefix: str) -> CpuGatedNorm:
        return cls(declared, gated_norm_weight(weights, declared, prefix))

    def write(self, ops: ProgramOps, x: Buffer, gate: Buffer | None = None) -> Buffer:
        declared, out = self.declared, ops.room(x.columns, ops.inner)
        kind = "none" if gate is None else declared.activation
        ops.builder.gated_norm(x, gate, self.weight, out, group=declared.group, eps=declared.eps, activation=kind)
        return out


@dataclass(frozen=True)
class CpuAdded:
    """`Added`."""

    scale: float

    @classmethod
    def read(cls, weights: CpuWeights, declared: Added, prefix: str) -> CpuAdded:
        return cls(declared.scale)

    def write(self, ops: ProgramOps, x: Buffer, y: Buffer) -> Buffer:
        ops.builder.add(ops.as_rows_of(x, y), x, self.scale)
        return x


@dataclass(frozen=True)
class CpuSoftCap:
    """A `SoftCap`."""

    cap: float

    @classmethod
    def read(cls, weights: CpuWeights, declared: SoftCap, prefix: str) -> CpuSoftCap:
        return cls(declared.cap)

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        ops.builder.soft_cap(x, self.cap)
        return x


@dataclass(frozen=True)
class CpuJoinedColumns:
    """`JoinedColumns`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: JoinedColumns, prefix: str) -> CpuJoinedColumns:
        return cls()

    def write(self, ops: ProgramOps, *parts: Buffer) -> Buffer:
        out, first = ops.room(sum(each.columns for each in parts), parts[0].tensor.dtype), 0
        for each in parts:
            ops.builder.copy(each, out.part(first, each.columns))
            first += each.columns
        return out


@dataclass(frozen=True)
class CpuHeadNorms:
    """`HeadNorms` with their weights."""

    declared: HeadNorms
    weight: Tensor
    """[heads * head_dim] of this rank, float32"""

    @classmethod
    def read(cls, weights: CpuWeights, declared: HeadNorms, prefix: str) -> CpuHeadNorms:
        return cls(declared, head_norm_weights(weights, declared, prefix))

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        out = ops.room(x.columns, x.tensor.dtype)
        ops.builder.gated_norm(x, None, self.weight, out, group=self.declared.head_dim, eps=self.declared.eps)
        return out


@dataclass(frozen=True)
class CpuSum:
    """A `Sum`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: Sum, prefix: str) -> CpuSum:
        return cls()

    def write(self, ops: ProgramOps, x: Buffer, *parts: Buffer) -> Buffer:
        columns = sum(each.columns for each in parts) or x.columns
        out, first = ops.room(columns, torch.float32), 0
        ops.builder.copy(x if columns == x.columns else x.part(0, columns), out)
        for each in parts:
            ops.builder.add(each, out.part(first, each.columns))
            first += each.columns
        return out


@dataclass(frozen=True)
class CpuHalves:
    """`Halves`."""

    activation: str

    @classmethod
    def read(cls, weights: CpuWeights, declared: Halves, prefix: str) -> CpuHalves:
        return cls(declared.activation)

    def write(self, ops: ProgramOps, both: Buffer) -> Buffer:
        out = ops.room(both.columns // 2, ops.inner)
        ops.builder.activation_multiply(both, out, self.activation)
        return out


@dataclass(frozen=True)
class CpuOutputGate:
    """An `OutputGate`."""

    declared: OutputGate

    @classmethod
    def read(cls, weights: CpuWeights, declared: OutputGate, prefix: str) -> CpuOutputGate:
        return cls(declared)

    def write(self, ops: ProgramOps, x: Buffer, gate: Buffer) -> Buffer:
        gate = ops.as_rows_of(x, gate)
        out = ops.room(x.columns, ops.inner)
        group = x.columns // gate.columns if self.declared.group > 1 else x.columns
        ops.builder.gated_norm(x, gate, None, out, group=group, activation=self.declared.activation)
        return out
