"""Hyper-connections (Zhu et al. 2024): a residual stream of several rows of hidden values, of which each block reads a
weighted sum, and to each of which its result is added with a weight. Rows may be mixed with one another too, by
matrices whose rows and columns add up to 1 (manifold-constrained hyper-connections: Xie et al. 2026)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import Declared, LayerHeld, LayerOps, Ops, Stream, Value, Vector, Weight


@dataclass(frozen=True)
class ExactMatrix(Declared):
    """A matrix that ops take directly, in float32."""

    eager_reader = "headrace.executor.models.reading:CheckedWeights.exact"

    name: str
    """Complete: no `.weight` follows."""
    rows: int
    columns: int

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.name, (self.rows, self.columns), "router")


@dataclass(frozen=True)
class HyperConnections(Stream):
    """The stream of a token is num_rows rows of hidden values, at first its embedding in each. Weights are computed in
    float32 from the normed stream, as a router's: sigmoids of scale * logit + bias, and for the matrix that mixes rows
    a softmax, whose rows and columns are then divided by their sums in turn (Sinkhorn and Knopp)."""

    placement = "pre"

    hidden: int
    num_rows: int
    norm_eps: float
    eps: float
    """Added to weights of what a block reads, and to the sums by which the mixing matrix is divided."""
    magnitude: float
    """The largest weight of a block's result."""
    least: float
    """Added to the weights of a block's result."""
    mixing_steps: int = 0
    """How often the mixing matrix is divided by the sums of its columns; 0: rows are not mixed."""
    weighted_end: bool = True
    """Whether the last norm reads a weighted sum of the rows, instead of their mean."""

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return self._weights("hc_head.hc_", self.num_rows, 1) if self.weighted_end else {}

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        rows, mixes = self.num_rows, self.mixing_steps > 0
        count = 2 * rows + rows * rows * mixes
        parts = {key: self._weights(f"{key}.", count, 2 + mixes) for key in ("attn_hc", "ffn_hc")}
        return {f"{key}.{name}": each for key, part in parts.items() for name, each in part.items()}

    def _weights(self, start: str, count: int, num_scales: int) -> dict[str, Declared]:
        """Of `count` weights, in num_scales groups with a scale each."""
        return {
            "fn": ExactMatrix(f"{start}fn", count, self.num_rows * self.hidden),
            "base": Vector(f"{start}base", count),
            "scale": Vector(f"{start}scale", num_scales),
        }

    def width(self, num_layers: int) -> int:
        return self.num_rows * self.hidden

    def begin(self, ops: Ops, held: Mapping[str, Any], embedded: Value, inputs: Value | None) -> Value:
        return ops.call(lambda x: x.repeat(1, self.num_rows), embedded)

    def end(self, ops: Ops, held: Mapping[str, Any], x: Value) -> Value:
        if not self.weighted_end:
            return ops.call(lambda x: self._rows(x).mean(1).to(x.dtype), x)
        return ops.call(self._last, x, held["fn"], held["base"], held["scale"])

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        own, norms = held.stream, held.norms
        blocks = (("attn_hc", layer.mixer, held.mixer, "mixer"), ("ffn_hc", layer.ffn, held.ffn, "ffn"))
        for at, block, held_block, norm in blocks:
            weights = ops.call(self._weights_of, x, *(own[f"{at}.{name}"] for name in ("fn", "base", "scale")))
            read = ops.norm(norms[norm], ops.call(self._read, x, weights))
            x = ops.call(self._next, x, weights, ops.total(block.emit(ops, held_block, read)))
        return x

    def values_per_token(self) -> int:
        """The stream before and after a block and its rows in float32, which count twice."""
        return 6 * self.num_rows * self.hidden

    def problem(self) -> str:
        if self.num_rows < 1:
            return f"the stream's num_rows must be at least 1, got {self.num_rows}"
        return "" if self.magnitude > 0 else f"hyper-connections' magnitude must be positive, got {self.magnitude}"

    def _rows(self, x: Value) -> Value:
        """x: a stream -> [num_tokens, num_rows, hidden] float32"""
        return x.unflatten(-1, (self.num_rows, self.hidden)).float()

    def _logits(self, x: Value, fn: Value) -> Value:
        """x: a stream, fn [count, num_rows * hidden] float32 -> [num_tokens, count] float32"""
        wide = x.float()
        return (wide @ fn.T) * (wide.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()

    def _weights_of(self, x: Value, fn: Value, base: Value, scale: Value) -> Value:
        """x: a stream -> [num_tokens, 2 + num_rows, num_rows] float32, without mixing [num_tokens, 2, num_rows]: of
        what the block reads, of its result for each row, and of each row for all"""
        found = self._logits(x, fn).unflatten(-1, (-1, self.num_rows))
        base = base.unflatten(0, (-1, self.num_rows))
        found[:, 0] = (found[:, 0] * scale[0] + base[0]).sigmoid() + self.eps
        found[:, 1] = self.magnitude * (found[:, 1] * scale[1] + base[1]).sigmoid() + self.least
        if self.mixing_steps:
            mixing = (found[:, 2:] * scale[2] + base[2:]).softmax(-1) + self.eps
            for step in range(self.mixing_steps):
                if step:
                    mixing = mixing / (mixing.sum(-1, keepdim=True) + self.eps)
                mixing = mixing / (mixing.sum(-2, keepdim=True) + self.eps)
            found[:, 2:] = mixing
        return found

    def _read(self, x: Value, weights: Value) -> Value:
        """-> [num_tokens, hidden]"""
        return (weights[:, 0, :, None] * self._rows(x)).sum(1).to(x.dtype)

    def _next(self, x: Value, weights: Value, result: Value) -> Value:
        """x: the stream before a block, result [num_tokens, hidden]: of the block -> the stream after it"""
        rows = self._rows(x)
        kept = weights[:, 2:].transpose(1, 2) @ rows if self.mixing_steps else rows
        return (weights[:, 1, :, None] * result.float()[:, None] + kept).flatten(1).to(x.dtype)

    def _last(self, x: Value, fn: Value, base: Value, scale: Value) -> Value:
        """x: a stream -> [num_tokens, hidden]"""
        weights = (self._logits(x, fn) * scale + base).sigmoid() + self.eps
        return (weights[:, :, None] * self._rows(x)).sum(1).to(x.dtype)
