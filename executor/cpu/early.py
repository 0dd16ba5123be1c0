"""A layer's input that experts read behind its attention, in a CPU program: what `blocks.early_experts` declares."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuWeights
from headrace.executor.models.blocks import Declared
from headrace.kernels.cpu.facade import Buffer


@dataclass(frozen=True)
class CpuKeptInput:
    """A `KeptInput`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: Declared, prefix: str) -> CpuKeptInput:
        return cls()

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        ops.kept = x
        return x


@dataclass(frozen=True)
class CpuTakenInput:
    """A `TakenInput`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: Declared, prefix: str) -> CpuTakenInput:
        return cls()

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        assert ops.kept is not None, "the layer's mixer has kept it"
        return ops.as_rows_of(x, ops.kept)
