"""Residuals that skip layers (Solar Pro's backbone skip connections): before some layers the residual stream is kept,
and before later ones it becomes a weighted mean of itself and of what was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import Declared, Held, LayerHeld, LayerOps, Ops, Value, WithoutWeights
from headrace.executor.models.blocks.beside import Beside


@dataclass(frozen=True)
class Copies(WithoutWeights, Declared):
    """compute(x): copies of x side by side."""

    eager_reader = "headrace.executor.models.eager_skips:EagerCopies"
    program_reader = "headrace.executor.cpu.skips:CpuCopies.read"

    count: int


@dataclass(frozen=True)
class KeptColumns(WithoutWeights, Declared):
    """compute(columns, x): writes x into these columns, from `first` on, and returns them."""

    eager_reader = "headrace.executor.models.eager_skips:EagerKeptColumns"
    program_reader = "headrace.executor.cpu.skips:CpuKeptColumns.read"

    first: int


@dataclass(frozen=True)
class Mean(WithoutWeights, Declared):
    """compute(x, y): x * (1 - share) + y * share; x itself may be overwritten."""

    eager_reader = "headrace.executor.models.eager_skips:EagerMean"
    program_reader = "headrace.executor.cpu.skips:CpuMean.read"

    share: float
    """Of y."""


@dataclass(frozen=True)
class SkippingLayer(LayerSpec):
    """A layer of a model with `Skips`."""

    keeps: tuple[int, ...] = ()
    """Indices of the kept streams that are replaced by the stream before the layer."""
    takes: tuple[int, ...] = ()
    """Indices of the kept streams that are then mixed into the layer's input, in order."""


@dataclass(frozen=True)
class Skips(Beside):
    """The stream between layers, per token, with which also a later pipeline stage has what an earlier one kept:

        hidden values | kept stream 0 | kept stream 1 | ...

    What is kept before any layer has kept something is the embedding, which nothing reads.
    """

    placement = "pre"

    hidden: int
    num_kept: int
    share: float
    """Of a kept stream, when it is mixed in."""

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {"first": Copies(self.num_kept)}

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        kept = {f"keep_{index}": KeptColumns(index * self.hidden) for index in range(self.num_kept)}
        return {**kept, "mean": Mean(self.share)}

    def width(self, num_layers: int) -> int:
        return (1 + self.num_kept) * self.hidden

    def first_beside(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        return ops.compute(held["first"], embedded)

    def emit(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
        assert isinstance(layer, SkippingLayer), "its family makes the layers of this stream"
        own, norms, hidden = held.stream, held.norms, self.hidden
        for index in layer.keeps:
            ops.compute(own[f"keep_{index}"], ops.beside(), ops.stream())
        for index in layer.takes:
            ops.replace(ops.compute(own["mean"], ops.stream(), ops.columns(ops.beside(), index * hidden, hidden)))
        ops.add(layer.mixer.emit(ops, held.mixer, ops.normed(norms["mixer"])))
        ops.add(layer.ffn.emit(ops, held.ffn, ops.normed(norms["ffn"])))

    def values_per_token(self) -> int:
        """The stream before and after a layer, and its parts."""
        return 4 * self.width(0)
