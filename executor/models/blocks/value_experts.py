"""Attention whose values a mixture of experts computes: a router chooses a few of many matrices for each token, whose
activated products are weighted and added up (mixture of value attention, MBZUAI's K2 Horizon)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, Routing, Vector, Weight
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.gated_norm import GatedNorm
from headrace.executor.models.blocks.tensor_ops import beside


@dataclass(frozen=True)
class ValueExperts(Declared):
    """compute(x, logits, correction): the sum over the chosen matrices of their weights times silu(x W^T), [num_tokens,
    columns]. logits [num_tokens, number of matrices]; correction: of the router, or None."""

    eager_reader = "headrace.executor.models.eager_values:EagerValueExperts"

    matrices: tuple[str, ...]
    """Names, without `.weight`."""
    rows: Axis
    hidden: int
    routing: Routing

    def weights(self) -> Iterator[Weight]:
        for name in self.matrices:
            yield Weight(f"{name}.weight", (self.rows, self.hidden), "matrix")


@dataclass(frozen=True)
class NormedHeads(Declared):
    """compute(qk): queries and keys side by side, each head normed with weights of its own."""

    eager_reader = "headrace.executor.models.eager_values:EagerNormedHeads"

    query: GatedNorm
    key: GatedNorm

    def weights(self) -> Iterator[Weight]:
        yield from self.query.weights()
        yield from self.key.weights()


@dataclass(frozen=True)
class HorizonAttention(Attention):
    """Attention whose values may be those of experts, and whose heads may be normed with weights of their own."""

    norms_heads: bool = False
    num_experts: int = 0
    """Matrices of values among which a router chooses; 0: there is one."""
    routing: Routing | None = None
    correction: bool = False
    """Whether a vector is added to the scores when these are chosen."""

    @property
    def cpu_alone(self) -> str:  # type: ignore[override]
        return "experts of values" if self.num_experts else ""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, names, hidden = dict(super().declare(spec)), spec.names, spec.hidden_size
        queries = Axis(self.num_heads * self.head_dim, unit=self.head_dim, groups=self.num_kv_heads)
        keys = Axis(self.num_kv_heads * self.head_dim, unit=self.head_dim)
        if self.norms_heads:
            parts = ((names.query_norm, queries), (names.key_norm, keys))
            query, key = (GatedNorm(name, size, self.head_dim, spec.norm.eps) for name, size in parts)
            found["norms"] = NormedHeads(query, key)
        if self.routing is not None:
            found["qkv"] = Linear(((names.query, queries), (names.key, keys)), hidden, self.bias)
            found["router"] = Linear((("self_attn.v_router", self.num_experts),), hidden, role="router")
            each = tuple(f"self_attn.v_experts.{index}" for index in range(self.num_experts))
            found["values"] = ValueExperts(each, keys, hidden, self.routing)
            if self.correction:
                found["correction"] = Vector("self_attn.v_router.bias", self.num_experts)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        qkv = ops.linear(held["qkv"], x)
        if "norms" in held:
            qkv = ops.compute(held["norms"], qkv)
        if "values" in held:
            values = ops.compute(held["values"], x, ops.linear(held["router"], x), held.get("correction"))
            qkv = ops.call(beside, qkv, values)
        gate = ops.linear(held["gate"], x) if "gate" in held else None
        attended = ops.mix(held["attend"], qkv)
        if gate is not None:
            attended = ops.compute(held["gating"], attended, gate)
        return [ops.product(held["output"], attended)]

    def values_per_token(self, tp_size: int) -> int:
        """Besides those of attention, the products of chosen matrices."""
        chosen = self.routing.num_chosen if self.routing is not None else 0
        return super().values_per_token(tp_size) + chosen * self.num_kv_heads * self.head_dim // tp_size

    def problem(self) -> str:
        if self.routing is not None and not 1 <= self.routing.num_chosen <= self.num_experts:
            return f"{self.routing.num_chosen} of {self.num_experts} experts of values cannot be chosen for a token"
        return super().problem()
