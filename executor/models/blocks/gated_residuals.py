"""A residual stream of several rows, of which each block reads a mean that is gated column by column, and to each of
which its result is added with a weight; gates and weights are computed of all rows, each normed by itself (Qwen4-Exp's
hyper-connections)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import Declared, LayerHeld, LayerOps, Linear, Norm, Ops, Stream, Value
from headrace.executor.models.blocks.ngram_features import NGramDeltaRule
from headrace.executor.models.blocks.tensor_ops import copied

OF_BLOCK = {"mixer": "attn_hyper_connection", "ffn": "mlp_hyper_connection"}
LAST = "hyper_connection_mixer"
MOST_WEIGHT = 2.0
"""Of a block's result."""


@dataclass(frozen=True)
class GatedResiduals(Stream):
    placement = "none"

    hidden: int
    num_rows: int
    rank: int
    """Inner size of the gates' two matrices."""

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return self._gates(spec, LAST)

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found: dict[str, Declared] = {}
        for key, at in OF_BLOCK.items():
            found |= {f"{key}.{name}": each for name, each in self._gates(spec, at).items()}
            weights = ((f"{at}.block_inject_weight", self.num_rows),)
            found[f"{key}.weights"] = Linear(weights, self.width(0), role="router")
        return found

    def _gates(self, spec: ArchSpec, at: str) -> dict[str, Declared]:
        width = self.width(0)
        return {
            "norm": replace(Norm.of(spec, f"{at}.hc_norm", width), groups=self.num_rows),
            "down": Linear(((f"{at}.input_mix_weight_down", self.rank),), width, role="router"),
            "up": Linear(((f"{at}.input_mix_weight_up", width),), self.rank, role="router"),
        }

    def width(self, num_layers: int) -> int:
        return self.num_rows * self.hidden

    def begin(self, ops: Ops, held: Mapping[str, Any], embedded: Value, inputs: Value | None) -> Value:
        return ops.call(lambda x: x.repeat(1, self.num_rows), embedded)

    def end(self, ops: Ops, held: Mapping[str, Any], x: Value) -> Value:
        return self._read(ops, held, ops.norm(held["norm"], ops.call(copied, x)))

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        if isinstance(layer.mixer, NGramDeltaRule):
            x = layer.mixer.with_features(ops, held.mixer, x)
        for key, block, held_block in (("mixer", layer.mixer, held.mixer), ("ffn", layer.ffn, held.ffn)):
            own = {name: held.stream[f"{key}.{name}"] for name in ("norm", "down", "up", "weights")}
            normed = ops.norm(own["norm"], ops.call(copied, x))
            result = ops.total(block.emit(ops, held_block, self._read(ops, own, normed)))
            x = ops.call(self._next, x, ops.linear(own["weights"], normed), result)
        return x

    def values_per_token(self) -> int:
        """The stream before and after a block, its rows normed, gates, and both in float32."""
        return 8 * self.width(0)

    def problem(self) -> str:
        for name in ("num_rows", "rank"):
            if getattr(self, name) < 1:
                return f"the stream's {name} must be at least 1, got {getattr(self, name)}"
        return ""

    def _read(self, ops: Ops, held: Mapping[str, Any], normed: Value) -> Value:
        """-> [num_tokens, hidden]"""
        inner = ops.call(self._activated, ops.linear(held["down"], normed))
        return ops.call(self._mean, normed, ops.linear(held["up"], inner))

    def _activated(self, inner: Value) -> Value:
        share = inner.float() / self.num_rows
        return (share * share.sigmoid()).to(inner.dtype)

    def _mean(self, normed: Value, gates: Value) -> Value:
        rows = (normed.float() * gates.float().sigmoid()).unflatten(1, (self.num_rows, self.hidden))
        return rows.mean(1).to(normed.dtype)

    def _next(self, x: Value, logits: Value, result: Value) -> Value:
        """logits [num_tokens, num_rows], result [num_tokens, hidden] -> the stream after the block"""
        weights = MOST_WEIGHT * (logits.float() / self.num_rows).sigmoid()
        return x + (weights[..., None] * result.float()[:, None]).flatten(1).to(x.dtype)
