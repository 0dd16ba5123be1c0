"""What `blocks.looped_attention` declares, in a CPU program, and what a layer leaves to a later one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks.looped_attention import HeadGates, RotatedHeads
from headrace.executor.models.blocks.shortcut import Shortcut
from headrace.executor.models.eager_looped import head_gates
from headrace.kernels.cpu.facade import Buffer, PackedLinear


@dataclass(frozen=True)
class CpuHeadGates:
    """A `HeadGates`, as a matrix with a block of its own for each head, which is small beside a layer's others."""

    matrix: PackedLinear
    """[heads, heads * head_dim] of this rank"""
    bias: Tensor
    """[heads] float32"""

    @classmethod
    def read(cls, weights: CpuWeights, declared: HeadGates, prefix: str) -> CpuHeadGates:
        vectors, bias = head_gates(weights, declared, prefix)
        return cls(weights.pack(torch.block_diag(*vectors).to(weights.dtype)), bias)

    def write(self, ops: ProgramOps, heads: Buffer) -> Buffer:
        out = ops.room(len(self.bias), torch.float32)
        ops.builder.linear(self.matrix, heads, out, bias=self.bias)
        return out


@dataclass(frozen=True)
class CpuRotatedHeads:
    """A `RotatedHeads`."""

    declared: RotatedHeads

    @classmethod
    def read(cls, weights: CpuWeights, declared: RotatedHeads, prefix: str) -> CpuRotatedHeads:
        return cls(declared)

    def write(self, ops: ProgramOps, queries: Buffer) -> Buffer:
        out = ops.room(queries.columns, queries.tensor.dtype)
        ops.builder.copy(queries, out)
        ops.builder.prepare_heads(out, self.declared.head_dim, ops.rotary(self.declared.rope), None)
        return out


@dataclass(frozen=True)
class CpuShortcut:
    """A `Shortcut`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: Shortcut, prefix: str) -> CpuShortcut:
        return cls()

    def write(self, ops: ProgramOps, *given: Buffer) -> Buffer:
        if given:
            ops.leave(given[0])
        return ops.left()
