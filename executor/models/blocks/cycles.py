"""Recurrence in depth (hierarchical reasoning models: Wang et al. 2025): two stacks of layers run in turn, several
times each. Every run reads the sum of what both have computed last; the low stack runs several times, the high one once
in a cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import Declared, LayerHeld, LayerOps, Norm, Ops, Stream, Value, Vector
from headrace.executor.models.blocks.tensor_ops import added, beside, columns, copied

HIGH, LOW = 0, 1


@dataclass(frozen=True)
class CycledLayer(LayerSpec):
    """A layer in one run of its stack."""

    row: int = HIGH
    """Of which stack it is: the row of the stream that it changes."""
    begins: bool = False
    """Whether it is the first of its stack, which reads the sum of both rows."""
    ends: bool = False
    """Whether it is the last of its stack, after which its row is normed."""


@dataclass(frozen=True)
class Cycles(Stream):
    """The stream of a token is the results of the high and of the low stack: at first its embedding, and a vector that
    all tokens have."""

    placement = "pre"

    hidden: int
    eps: float
    """Of the norm that ends each run of a stack."""

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {"low": Vector("z_L_init", self.hidden)}

    def width(self, num_layers: int) -> int:
        return 2 * self.hidden

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {"end": Norm("final_norm", self.hidden, "rms", self.eps, weight_offset=0.0, affine=False)}

    def begin(self, ops: Ops, held: Mapping[str, Any], embedded: Value, inputs: Value | None) -> Value:
        return ops.call(lambda high, low: beside(high, low.to(high.dtype).expand_as(high)), embedded, held["low"])

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        assert isinstance(layer, CycledLayer), "its family makes the layers of this stream"
        rows = [self._row(ops, x, row) for row in (HIGH, LOW)]
        row = ops.call(added, *rows) if layer.begins else rows[layer.row]
        for block, held_block, norm in ((layer.mixer, held.mixer, "mixer"), (layer.ffn, held.ffn, "ffn")):
            read = ops.norm(held.norms[norm], ops.call(copied, row))
            row = ops.call(added, row, ops.total(block.emit(ops, held_block, read)))
        rows[layer.row] = ops.norm(held.stream["end"], row) if layer.ends else row
        return ops.call(beside, *rows)

    def end(self, ops: Ops, held: Mapping[str, Any], x: Value) -> Value:
        return self._row(ops, x, HIGH)

    def values_per_token(self) -> int:
        """The stream before and after a layer, its two rows, and a row with a copy."""
        return 8 * self.hidden

    def _row(self, ops: Ops, x: Value, row: int) -> Value:
        """x: a stream -> [num_tokens, hidden]"""
        return ops.call(columns, x, row * self.hidden, (row + 1) * self.hidden)
