"""Layers that keep a state per sequence, in a CPU program: what they declare, with its weights, and the ops that they
write. A step changes the states that it reads, so none of these may be computed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks.recurrent import GroupNorm, Scan
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.models.eager_states import convolve_params, scan_params
from headrace.kernels.cpu.facade import Buffer, Norm, write_convolve, write_scan
from headrace.kernels.reference.states import ConvolveParams, ScanParams


@dataclass(frozen=True)
class CpuConvolve:
    """A `Convolve` with its weights."""

    params: ConvolveParams

    @classmethod
    def read(cls, weights: CpuWeights, declared: Convolve, prefix: str) -> CpuConvolve:
        return cls(convolve_params(weights, declared, prefix))

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        params = self.params
        # A gated result is a linear layer's input; the others are read by a scan.
        out = ops.room(len(params.weight), ops.inner if params.gated else torch.float32)
        write_convolve(ops.builder, x, out, params, ops.states, ops.cache)
        return out


@dataclass(frozen=True)
class CpuScan:
    """A `Scan` with its vectors."""

    params: ScanParams

    @classmethod
    def read(cls, weights: CpuWeights, declared: Scan, prefix: str) -> CpuScan:
        return cls(scan_params(weights, declared, prefix))

    def write(self, ops: ProgramOps, mixed: Buffer, steps: Buffer, gate: Buffer) -> Buffer:
        out = ops.room(gate.columns, torch.float32)
        write_scan(ops.builder, mixed, steps, gate, out, self.params, ops.states, ops.cache)
        return out


@dataclass(frozen=True)
class CpuGroupNorm:
    """A `GroupNorm` with its weight, [columns of this rank] float32."""

    declared: GroupNorm
    weight: Tensor

    @classmethod
    def read(cls, weights: CpuWeights, declared: GroupNorm, prefix: str) -> CpuGroupNorm:
        name = f"{prefix}{declared.name}.weight"
        return cls(declared, weights.vector(name, declared.size.size, take=declared.size.own(weights.place)))

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        size, out = self.declared.group, ops.room(x.columns, ops.inner)
        for first in range(0, x.columns, size):
            norm = Norm("rms", self.declared.eps, self.weight[first : first + size])
            ops.builder.norm(x.part(first, size), out.part(first, size), norm)
        return out
