"""Gates: products with activated values of the same columns, after a norm of groups of columns or without one; and
sums, caps, joined columns, and gates of which few columns are not zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.executor.models.blocks import Axis, Declared, Dimension, Weight, WithoutWeights, size_of

GateActivation = Literal["silu", "sigmoid", "gelu", "gelu_tanh", "relu", "relu2", "softplus", "softplus2"]


@dataclass(frozen=True)
class OutputGate(WithoutWeights, Declared):
    """compute(x, gate): x * activation(gate), columns by columns, or with one gate for each group of columns."""

    eager_reader = "headrace.executor.models.eager_states:EagerOutputGate.read"
    program_reader = "headrace.executor.cpu.recurrent:CpuOutputGate.read"

    activation: GateActivation
    group: int = 1


@dataclass(frozen=True)
class Added(WithoutWeights, Declared):
    """compute(x, y): x + y * scale; x itself may be overwritten."""

    eager_reader = "headrace.executor.models.eager_states:EagerAdded"
    program_reader = "headrace.executor.cpu.recurrent:CpuAdded.read"

    scale: float = 1.0


@dataclass(frozen=True)
class SoftCap(WithoutWeights, Declared):
    """compute(x): cap * tanh(x / cap); x itself may be overwritten."""

    eager_reader = "headrace.executor.models.eager_states:EagerSoftCap"
    program_reader = "headrace.executor.cpu.recurrent:CpuSoftCap.read"

    cap: float


@dataclass(frozen=True)
class JoinedColumns(WithoutWeights, Declared):
    """compute(x, y, ...): the columns of x, then those of y, and so on."""

    eager_reader = "headrace.executor.models.eager_states:EagerJoinedColumns"
    program_reader = "headrace.executor.cpu.recurrent:CpuJoinedColumns.read"


@dataclass(frozen=True)
class SparseGate(WithoutWeights, Declared):
    """compute(gate, whole, up): activation(relu(gate - lowest)) * up. lowest: the mean of a row of `whole`, the gate of
    all ranks, plus `cutoff` standard deviations."""

    eager_reader = "headrace.executor.models.eager_states:EagerSparseGate"
    program_reader = "headrace.executor.cpu.altup:CpuSparseGate.read"

    activation: str
    cutoff: float
    num_counted: int
    """Columns of `whole` that are not padding."""


@dataclass(frozen=True)
class HeadNorms(Declared):
    """An RMS norm of each head, with weights of its own, which are stored as [heads, head_dim].

    compute(x): [num_tokens, heads * head_dim] -> the same, normed, in x's type."""

    eager_reader = "headrace.executor.models.eager_states:EagerHeadNorms"
    program_reader = "headrace.executor.cpu.recurrent:CpuHeadNorms.read"

    name: str
    heads: Axis
    head_dim: int
    eps: float

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", (self.heads, self.head_dim), "norm")


@dataclass(frozen=True)
class GatedNorm(Declared):
    """An RMS norm of each group of `group` neighbouring columns, whose result may be multiplied by activated gates.

    compute(x): [num_tokens, columns] -> the same, normed; compute(x, gate): times activation(gate)."""

    eager_reader = "headrace.executor.models.eager_states:EagerGatedNorm"
    program_reader = "headrace.executor.cpu.recurrent:CpuGatedNorm.read"

    name: str
    size: Axis
    """All columns of all ranks; a rank has a whole number of groups, or a part of the only one."""
    group: int
    eps: float
    activation: GateActivation = "silu"
    shared: bool = False
    """Whether the weights of one group serve all."""
    scale: float = 1.0
    """Multiplies the norm's result."""

    @property
    def weight_size(self) -> Dimension:
        return self.group if self.shared else self.size

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", (size_of(self.weight_size),), "norm")
