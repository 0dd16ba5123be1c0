"""Gemma 3n's residual stream: several rows of hidden values, of which each layer computes one and corrects all
(alternating updates, AltUp: Baykal et al. 2023), with a low-rank residual (LAuReL: Menghani et al. 2024) and token
embeddings for each layer (per-layer inputs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable
from headrace.executor.models.blocks import (
    Declared,
    Held,
    LayerHeld,
    LayerOps,
    Linear,
    Norm,
    Ops,
    Value,
    Vector,
    Weight,
    WithoutWeights,
)
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.blocks.gated_norm import Added, GateActivation
from headrace.executor.models.blocks.layer_inputs import (
    declared_input,
    declared_inputs,
    inputs_table,
    projected_inputs,
)

LEAST_SQUARE = 1e-5
"""Lower bound of a projected row's mean square, by which is divided."""
HALF_POWER = 2**-0.5
"""Of two residuals that are added, to keep their magnitude."""


@dataclass(frozen=True)
class Tanh(WithoutWeights, Declared):
    """compute(x): tanh(x); x itself may be overwritten."""

    eager_reader = "headrace.executor.models.eager_altup:EagerTanh"
    program_reader = "headrace.executor.cpu.altup:CpuTanh.read"


@dataclass(frozen=True)
class MixedRows(WithoutWeights, Declared):
    """compute(rows, shares): each of a token's rows plus a linear combination of all. shares: [num_rows * num_rows]."""

    eager_reader = "headrace.executor.models.eager_altup:EagerMixedRows"
    program_reader = "headrace.executor.cpu.altup:CpuMixedRows.read"

    num_rows: int


@dataclass(frozen=True)
class CorrectedRows(WithoutWeights, Declared):
    """compute(rows, computed, shares): each row plus (computed - the active row) * (its share + 1)."""

    eager_reader = "headrace.executor.models.eager_altup:EagerCorrectedRows"
    program_reader = "headrace.executor.cpu.altup:CpuCorrectedRows.read"

    num_rows: int
    active: int


@dataclass(frozen=True)
class OtherRows(WithoutWeights, Declared):
    """compute(rows, x): the rows, with x added to all but the first; they themselves may be overwritten."""

    eager_reader = "headrace.executor.models.eager_altup:EagerOtherRows"
    program_reader = "headrace.executor.cpu.altup:CpuOtherRows.read"

    num_rows: int


@dataclass(frozen=True)
class FirstRows(WithoutWeights, Declared):
    """compute(first, others): the rows side by side, the others scaled to the first one's mean square."""

    eager_reader = "headrace.executor.models.eager_altup:EagerFirstRows"
    program_reader = "headrace.executor.cpu.altup:CpuFirstRows.read"


@dataclass(frozen=True)
class MeanRow(WithoutWeights, Declared):
    """compute(first, *others): the mean of rows, the others scaled to the first one's mean square."""

    eager_reader = "headrace.executor.models.eager_altup:EagerMeanRow"
    program_reader = "headrace.executor.cpu.altup:CpuMeanRow.read"


@dataclass(frozen=True)
class ScaledColumns(Declared):
    """compute(x): x * a vector, column by column."""

    eager_reader = "headrace.executor.models.eager_altup:EagerScaledColumns"
    program_reader = "headrace.executor.cpu.altup:CpuScaledColumns.read"

    vector: Vector

    def weights(self) -> Iterator[Weight]:
        return self.vector.weights()


@dataclass(frozen=True)
class AltUp(Beside):
    """The stream between layers, per token:

        row 0 | row 1 | ... | the next layer's input | the input of the layer after it | ...

    Each layer removes its input, so that only the rows are left after the last.
    """

    hidden: int
    num_rows: int
    active: int
    """Index of the row that the layers' blocks compute."""
    laurel_rank: int
    input_size: int
    """Size of each layer's input."""
    num_layers: int
    layer_vocab_size: int
    """Number of token ids with per-layer embeddings; larger ids use those of token 0."""
    activation: GateActivation
    scales_active: bool = True
    """Whether the active row is scaled before it gates the layer's input."""

    @property
    def table(self) -> LayerTable:
        return inputs_table(self.layer_vocab_size, self.num_layers, self.input_size)

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        hidden, others = self.hidden, range(self.num_rows - 1)
        return {
            "rows": Linear(tuple((f"altup_projections.{index}", hidden) for index in others), hidden),
            "first": FirstRows(),
            **declared_inputs(spec, self.num_layers, self.input_size),
        }

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names = (f"altup_unembed_projections.{i}" for i in range(self.num_rows - 1))
        found = {f"last_{i}": Linear(((name, self.hidden),), self.hidden) for i, name in enumerate(names)}
        return {**found, "mean": MeanRow()}

    def width(self, num_layers: int) -> int:
        return self.num_rows * self.hidden + (self.num_layers - num_layers) * self.input_size

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        hidden, rows = self.hidden, self.num_rows
        router_norm = replace(Norm.of(spec, "altup.router_norm", hidden), scale=1 / hidden)
        found: dict[str, Declared] = {
            "router_norm": router_norm,
            "router": Linear((("altup.modality_router", rows),), hidden, role="router"),
            "predict": Linear((("altup.prediction_coefs", rows * rows),), rows, role="router"),
            "correct": Linear((("altup.correction_coefs", rows),), rows, role="router"),
            "left": Linear((("laurel.linear_left", self.laurel_rank),), hidden),
            "right": Linear((("laurel.linear_right", hidden),), self.laurel_rank),
            "laurel_norm": Norm.of(spec, "laurel.post_laurel_norm", hidden),
            "tanh": Tanh(),
            "predicted": MixedRows(rows),
            "corrected": CorrectedRows(rows, self.active),
            "others": OtherRows(rows),
            "sum": Added(),
            "half_sum": Added(HALF_POWER),
            **declared_input(spec, self.input_size, self.activation),
        }
        if self.scales_active:
            found["active_scale"] = ScaledColumns(Vector("altup.correct_output_scale", hidden))
        return found

    @property
    def rows(self) -> int:
        return self.num_rows

    def first_rows(self, ops: Ops, held: Held, embedded: Value) -> Value:
        return ops.compute(held["first"], embedded, ops.linear(held["rows"], embedded))

    def first_beside(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        assert inputs is not None, "there is a table"
        return projected_inputs(ops, held, embedded, inputs)

    def last_row(self, ops: Ops, held: Held, rows: Value) -> Value:
        others = [ops.linear(held[f"last_{i}"], self._row(ops, rows, i + 1)) for i in range(self.num_rows - 1)]
        return ops.compute(held["mean"], self._row(ops, rows, 0), *others)

    def emit(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
        own, norms, rows = held.stream, held.norms, ops.rows()
        ops.replace(self._row(ops, rows, self.active))
        predicted = ops.compute(own["predicted"], rows, ops.linear(own["predict"], self._routed(ops, own)))
        ops.replace(self._row(ops, predicted, self.active))
        normed = ops.normed(norms["mixer"])
        laurel = ops.norm(own["laurel_norm"], ops.linear(own["right"], ops.linear(own["left"], normed)))
        laurel = ops.compute(own["sum"], laurel, normed)
        ops.add(layer.mixer.emit(ops, held.mixer, normed), norms["mixer_post"], HALF_POWER)
        ops.replace(ops.compute(own["half_sum"], ops.stream(), laurel))
        ops.add(layer.ffn.emit(ops, held.ffn, ops.normed(norms["ffn"])), norms["ffn_post"])
        shares = ops.linear(own["correct"], self._routed(ops, own))
        corrected = ops.compute(own["corrected"], predicted, ops.stream(), shares)
        active = self._row(ops, corrected, self.active)
        if self.scales_active:
            active = ops.compute(own["active_scale"], active)
        gated = ops.compute(own["gating"], ops.beside(), ops.linear(own["gate"], active))
        added = ops.norm(own["input_norm"], ops.linear(own["input"], gated))
        ops.put_rows(ops.compute(own["others"], corrected, added))

    def values_per_token(self) -> int:
        """The stream before and after a layer, predicted and corrected rows, and what the inputs are computed from."""
        return 6 * self.num_rows * self.hidden + 6 * self.num_layers * self.input_size

    def problem(self) -> str:
        for name in ("num_rows", "laurel_rank", "input_size", "layer_vocab_size"):
            if getattr(self, name) < 1:
                return f"the stream's {name} must be at least 1, got {getattr(self, name)}"
        if not 0 <= self.active < self.num_rows:
            return f"altup_active_idx must be one of {self.num_rows} rows, got {self.active}"
        return ""

    def _routed(self, ops: LayerOps, own: Held) -> Value:
        """Router of the layer's row -> [num_tokens, num_rows], in [-1, 1]."""
        return ops.compute(own["tanh"], ops.linear(own["router"], ops.normed(own["router_norm"])))

    def _row(self, ops: Ops, rows: Value, index: int) -> Value:
        return ops.columns(rows, index * self.hidden, self.hidden)
