"""Gemma 3n's residual stream: several rows of hidden values, of which each layer computes one and corrects all
(alternating updates, AltUp: Baykal et al. 2023), with a low-rank residual (LAuReL: Menghani et al. 2024) and token
embeddings for each layer (per-layer inputs)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable
from headrace.executor.models.blocks import Declared, LayerHeld, LayerOps, Linear, Norm, Ops, Stream, Value, Vector
from headrace.executor.models.blocks.gated_norm import GateActivation
from headrace.executor.models.blocks.layer_inputs import (
    declared_input,
    declared_inputs,
    inputs_table,
    projected_inputs,
)
from headrace.executor.models.blocks.tensor_ops import copied

LEAST_SQUARE = 1e-5
"""Lower bound of a projected row's mean square, by which is divided."""


@dataclass(frozen=True)
class AltUp(Stream):
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
            **declared_inputs(spec, self.num_layers, self.input_size),
        }

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names = (f"altup_unembed_projections.{i}" for i in range(self.num_rows - 1))
        return {f"last_{i}": Linear(((name, self.hidden),), self.hidden) for i, name in enumerate(names)}

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
            **declared_input(spec, self.input_size, self.activation),
        }
        if self.scales_active:
            found["active_scale"] = Vector("altup.correct_output_scale", hidden)
        return found

    def begin(self, ops: Ops, held: Mapping[str, Any], embedded: Value, inputs: Value) -> Value:
        inputs = projected_inputs(ops, held, embedded, inputs)
        return ops.call(self._first, embedded, ops.linear(held["rows"], embedded), inputs)

    def end(self, ops: Ops, held: Mapping[str, Any], x: Value) -> Value:
        rows = ops.call(self._rows, x)
        others = [ops.linear(held[f"last_{i}"], ops.call(_row, rows, i + 1)) for i in range(self.num_rows - 1)]
        return ops.call(_mean, ops.call(_row, rows, 0), *others)

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        own, norms = held.stream, held.norms
        predicted = ops.call(self._predicted, x, ops.linear(own["predict"], self._routed(ops, own, x)))
        active = ops.call(_row, predicted, self.active)
        normed = ops.norm(norms["mixer"], ops.call(copied, active))
        laurel = ops.norm(own["laurel_norm"], ops.linear(own["right"], ops.linear(own["left"], normed)))
        mixed = ops.norm(norms["mixer_post"], ops.total(layer.mixer.emit(ops, held.mixer, normed)))
        stream = ops.call(_half_power, active, mixed, normed, laurel)
        computed = layer.ffn.emit(ops, held.ffn, ops.norm(norms["ffn"], ops.call(copied, stream)))
        activated = ops.call(_total, stream, ops.norm(norms["ffn_post"], ops.total(computed)))
        shares = ops.linear(own["correct"], self._routed(ops, own, activated))
        corrected = ops.call(self._corrected, predicted, activated, shares)
        scale = (own["active_scale"],) if self.scales_active else ()
        gated = ops.linear(own["gate"], ops.call(_scaled, ops.call(_row, corrected, self.active), *scale))
        added = ops.linear(own["input"], ops.compute(own["gating"], ops.call(self._input, x), gated))
        return ops.call(self._next, corrected, ops.norm(own["input_norm"], added), x)

    def values_per_token(self) -> int:
        """The stream before and after a layer, the predicted and corrected rows, and the per-layer inputs."""
        return 6 * self.num_rows * self.hidden + 4 * self.num_layers * self.input_size

    def problem(self) -> str:
        for name in ("num_rows", "laurel_rank", "input_size", "layer_vocab_size"):
            if getattr(self, name) < 1:
                return f"the stream's {name} must be at least 1, got {getattr(self, name)}"
        if not 0 <= self.active < self.num_rows:
            return f"altup_active_idx must be one of {self.num_rows} rows, got {self.active}"
        return ""

    def _routed(self, ops: Ops, own: Mapping[str, Any], x: Value) -> Value:
        """Router of the active row. x: a stream, or its active row alone -> [num_tokens, num_rows], in [-1, 1]."""
        active = ops.call(lambda stream: self._active(stream).clone(), x)
        return ops.call(_tanh, ops.linear(own["router"], ops.norm(own["router_norm"], active)))

    def _active(self, x: Value) -> Value:
        return x if x.shape[-1] == self.hidden else self._rows(x)[:, self.active]

    def _rows(self, x: Value) -> Value:
        """x: a stream -> [num_tokens, num_rows, hidden]"""
        return x[:, : self.num_rows * self.hidden].unflatten(-1, (self.num_rows, self.hidden))

    def _first(self, embedded: Value, projected: Value, inputs: Value) -> Value:
        """embedded [num_tokens, hidden], projected [num_tokens, (num_rows - 1) * hidden], inputs [num_tokens,
        num_layers * input_size] -> the stream"""
        width = self.num_rows * self.hidden
        x = embedded.new_empty(len(embedded), width + inputs.shape[-1])
        x[:, : self.hidden] = embedded
        rows = self._rows(x)
        for index in range(1, self.num_rows):
            rows[:, index] = _as_large(projected[:, (index - 1) * self.hidden : index * self.hidden], embedded)
        x[:, width:] = inputs
        return x

    def _predicted(self, x: Value, shares: Value) -> Value:
        """x: a stream, shares [num_tokens, num_rows * num_rows] -> its rows, each plus a linear combination of all"""
        rows = self._rows(x)
        return shares.unflatten(-1, (self.num_rows, self.num_rows)) @ rows + rows

    def _corrected(self, predicted: Value, activated: Value, shares: Value) -> Value:
        """predicted [num_tokens, num_rows, hidden], activated [num_tokens, hidden], shares [num_tokens, num_rows]"""
        news = activated - predicted[:, self.active]
        return news[:, None] * (shares + 1.0)[:, :, None] + predicted

    def _input(self, x: Value) -> Value:
        """x: the stream before the layer -> the layer's input, [num_tokens, input_size]"""
        first = self.num_rows * self.hidden
        return x[:, first : first + self.input_size]

    def _next(self, corrected: Value, added: Value, x: Value) -> Value:
        """corrected [num_tokens, num_rows, hidden]; added [num_tokens, hidden], for all rows but the first; x: the
        stream before the layer -> the stream after it"""
        width = self.num_rows * self.hidden
        corrected[:, 1:] += added[:, None]
        following = x.new_empty(len(x), x.shape[-1] - self.input_size)
        following[:, :width] = corrected.flatten(1)
        following[:, width:] = x[:, width + self.input_size :]
        return following


def _row(rows: Value, index: int) -> Value:
    return rows[:, index].contiguous()


def _tanh(x: Value) -> Value:
    return x.float().tanh().to(x.dtype)


def _total(*parts: Value) -> Value:
    total = parts[0]
    for each in parts[1:]:
        total = total + each
    return total


def _half_power(active: Value, mixed: Value, normed: Value, laurel: Value) -> Value:
    """Sum of attention's residual and LAuReL's, scaled by 1/sqrt(2) to keep its magnitude."""
    return ((active + mixed) + (normed + laurel)) * 2**-0.5


def _scaled(x: Value, *scale: Value) -> Value:
    return (x * scale[0]).to(x.dtype) if scale else x


def _mean_square(x: Value) -> Value:
    return x.square().mean(-1, keepdim=True)


def _as_large(x: Value, pattern: Value) -> Value:
    """x with each row scaled to the mean square of the row of `pattern`."""
    return x * _mean_square(pattern).sqrt() / _mean_square(x).clamp(min=LEAST_SQUARE).sqrt()


def _mean(first: Value, *others: Value) -> Value:
    return _total(first, *(_as_large(each, first) for each in others)) / (1 + len(others))
