"""Grouped-query attention (Ainslie et al. 2023) over keys and values in the paged cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeVar

from headrace.executor.models.arch import ArchSpec, RopeSpec, TokenCache
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    DistanceBias,
    Held,
    LayerOps,
    Linear,
    Mixer,
    Norm,
    Vector,
    rounded_up,
)
from headrace.executor.models.blocks.gated_norm import GateActivation, HeadNorms, JoinedColumns, OutputGate
from headrace.ipc.failure import ModelError

QueryGrowth = tuple[int, float, int] | None
"""`Attention.query_growth`."""


def growth_within(growth: QueryGrowth, longest: int) -> QueryGrowth:
    """`Attention.query_growth` of contexts up to `longest` tokens: None if queries grow at later positions alone."""
    return None if growth is None or longest - 1 + growth[2] < growth[0] else growth


@dataclass(frozen=True)
class Attention(Mixer):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies the scores (products of queries and keys)."""
    rope: RopeSpec | None
    """None: the layer has no rotary positions."""
    sliding_window: int | None = None
    """A token attends to itself and the sliding_window - 1 tokens before it; None: to all. With chunks, those that any
    token of a chunk can attend to, or None."""
    bias: bool = False
    """Whether the query, key and value projections have biases."""
    output_bias: bool = False
    qk_norm: Literal["no", "head", "whole"] = "no"
    """Norm of queries and keys before rotation: "head": of each head; "whole": of all heads as one row."""
    norm_after_rotation: bool = False
    """Whether the norms of each head follow the rotation."""
    query_growth: tuple[int, float, int] | None = None
    """positions_per_step, share and offset of `executor.models.chunks.query_growth`; None: queries are not scaled."""
    soft_cap: float | None = None
    sinks: bool = False
    """Whether each head has an attention sink: a score that takes part in the softmax and has no value."""
    clip_qkv: float | None = None
    """Largest magnitude of queries, keys and values, to which they are clipped after their projection and norm."""
    alibi: tuple[float, ...] = ()
    """ALiBi slope of each head, by which a score falls per token of distance; empty: no ALiBi."""
    alibi_root: bool = False
    """Whether a score falls by the slope times the root of the distance instead."""
    chunk_size: int | None = None
    """Tokens per chunk if a token attends only to its chunk and to `chunks_before` before it; None: no chunks."""
    chunks_before: int = 0
    grow_after: int | None = None
    """The scores of tokens at positions p beyond it grow, after the cap, by log(p) / log(grow_after); None: none do."""
    causal: bool = True
    """False: a token attends to the tokens after it too."""
    distance_bias: tuple[int, int, int] | None = None
    """num_buckets, most_distance and reach of a `DistanceBias`; None: there is none."""
    value_dim: int | None = None
    """Dimensions of a value head in the checkpoint, to which zeros are added up to head_dim; None: it has head_dim."""
    gated: bool = False
    """Whether the heads' results are multiplied by the activated columns of a further projection of the layer's input.
    """
    head_gate: bool = False
    """Likewise, by one gate for each head."""
    gate_activation: GateActivation = "sigmoid"
    gate_bias: bool = True
    """Whether the projection of the gates of `gated` has biases where those of queries, keys and values have."""

    @property
    def cache(self) -> TokenCache:
        return TokenCache(self.num_kv_heads, self.head_dim, self.head_dim)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, hidden = spec.names, spec.hidden_size
        queries = Axis(self.num_heads * self.head_dim, unit=self.head_dim, groups=self.num_kv_heads)
        keys = Axis(self.num_kv_heads * self.head_dim, unit=self.head_dim)
        values, results = keys, queries
        if (dim := self.value_dim) is not None:
            values = Axis(self.num_kv_heads * dim, unit=dim, groups=self.num_kv_heads)
            results = Axis(self.num_heads * dim, unit=dim, groups=self.num_heads)
        matrices = ((names.query, queries), (names.key, keys), (names.value, values))
        head_norms = dict[str, Norm]()
        found: dict[str, Declared] = {"qkv": Linear(matrices, hidden, self.bias)}
        if self.qk_norm == "head":
            head_norms["query_norm"] = Norm.of(spec, names.query_norm, self.head_dim)
            head_norms["key_norm"] = Norm.of(spec, names.key_norm, self.head_dim)
        elif self.qk_norm == "whole":
            found["query_norm"] = Norm.of(spec, names.query_norm, queries)
            found["key_norm"] = Norm.of(spec, names.key_norm, keys)
        found["attend"] = Attend(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            rope=self.rope,
            sliding_window=self.sliding_window if self.chunk_size is None else None,
            soft_cap=self.soft_cap,
            sinks=Vector(names.sinks, Axis(self.num_heads, groups=self.num_kv_heads)) if self.sinks else None,
            alibi=self.alibi,
            alibi_root=self.alibi_root,
            chunk_size=self.chunk_size,
            chunks_before=self.chunks_before,
            grow_after=self.grow_after,
            causal=self.causal,
            distance_bias=self._distance_bias(names.distance_bias),
            query_norm=head_norms.get("query_norm"),
            key_norm=head_norms.get("key_norm"),
            norm_after_rotation=self.norm_after_rotation,
            clip_qkv=self.clip_qkv,
            query_growth=self.query_growth,
        )
        found["output"] = Linear(((names.output, hidden),), results, self.output_bias)
        if self.gated:
            found["gate"] = Linear(((names.query_gate, queries),), hidden, self.bias and self.gate_bias)
            found["gating"] = OutputGate(self.gate_activation)
        elif self.head_gate:
            heads = Axis(self.num_heads, groups=self.num_kv_heads)
            found["gate"] = Linear(((names.query_gate, heads),), hidden)
            found["gating"] = OutputGate(self.gate_activation, group=self.head_dim)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        qkv = ops.linear(held["qkv"], x)
        if self.qk_norm == "whole":
            queries, keys = (held[name].columns for name in ("query_norm", "key_norm"))
            qkv = ops.norm(held["query_norm"], qkv, 0, queries)
            qkv = ops.norm(held["key_norm"], qkv, queries, queries + keys)
        gate = ops.linear(held["gate"], x) if "gate" in held else None
        attended = self.attended(ops, held, qkv, x)
        if gate is not None:
            attended = ops.compute(held["gating"], attended, gate)
        return [ops.product(held["output"], attended)]

    def attended(self, ops: LayerOps, held: Held, qkv: Any, x: Any) -> Any:
        """The heads' results. x: the layer's input"""
        return ops.mix(held["attend"], qkv)

    def for_context(self, longest: int) -> Self:
        found = super().for_context(longest)
        return replace(found, query_growth=growth_within(found.query_growth, longest))

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        """Pads key/value heads to a multiple of tp_size or, if they are fewer than ranks, to a divisor of it: then
        several ranks hold a copy of each and divide its query heads."""
        if self.num_heads < tp_size:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be divided among {tp_size} ranks: each needs at least one"
            )
        if self.qk_norm == "whole" and (self.num_heads % tp_size or self.num_kv_heads % tp_size):
            raise ModelError(
                f"{tp_size} ranks cannot share {self.num_heads} attention and {self.num_kv_heads} key/value heads "
                "evenly, and as all are normed as one row there can be no padding; choose a divisor of both"
            )
        own = group = self.num_heads // self.num_kv_heads
        if self.num_kv_heads >= tp_size:
            kv_heads = rounded_up(self.num_kv_heads, tp_size)
        else:
            kv_heads = next(n for n in range(self.num_kv_heads, tp_size + 1) if tp_size % n == 0)
            group = rounded_up(group, tp_size // kv_heads)
        if self.value_dim is not None and (kv_heads, group) != (self.num_kv_heads, own):
            raise ModelError(
                f"{tp_size} ranks cannot share {self.num_heads} attention and {self.num_kv_heads} key/value heads "
                "evenly, and values with fewer dimensions than keys leave no padding; choose a divisor of both"
            )
        slopes = [self.alibi[i * own : (i + 1) * own] for i in range(self.num_kv_heads)] if self.alibi else []
        padded = [(*each, *(0.0,) * (group - own)) for each in slopes]
        padded += [(0.0,) * group] * (kv_heads - self.num_kv_heads if slopes else 0)
        return replace(
            self,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            alibi=tuple(s for each in padded for s in each),
            value_dim=None if self.value_dim is None else self.head_dim,
        )

    def _distance_bias(self, name: str) -> DistanceBias | None:
        if self.distance_bias is None:
            return None
        num_buckets, most_distance, reach = self.distance_bias
        return DistanceBias(name, num_buckets, most_distance, Axis(self.num_heads, groups=self.num_kv_heads), reach)

    def values_per_token(self, tp_size: int) -> int:
        """Queries, keys and values, and attention's results; gates, and gated results."""
        gates = self.num_heads // tp_size * (2 if self.gated else self.head_gate)
        return (2 * (self.num_heads // tp_size + max(1, self.num_kv_heads // tp_size)) + gates) * self.head_dim

    def problem(self) -> str:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, got {getattr(self, name)}"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_dim:
            return f"values of {self.value_dim} dimensions; there must be at least 1 and at most {self.head_dim}"
        positive = {"attention_scale": self.scale, "attention_soft_cap": self.soft_cap, "clip_qkv": self.clip_qkv}
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                return f"{name} must be positive, got {value}"
        if self.query_growth is not None and self.query_growth[0] < 1:
            return f"queries that grow every {self.query_growth[0]} positions; it must be at least 1"
        if self.alibi and len(self.alibi) != self.num_heads:
            return f"{len(self.alibi)} slopes for {self.num_heads} attention heads"
        if self.sliding_window is not None and self.sliding_window < 1:
            return f"a sliding window of {self.sliding_window}; it must be at least 1"
        if self.chunk_size is not None and self.chunk_size < 1:
            return f"attention within chunks of {self.chunk_size} tokens; there must be at least 1"
        if self.grow_after is not None and self.grow_after < 2:
            return f"scores that grow after position {self.grow_after}; it must be at least 2"
        return ""

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        norm = Norm.of(spec, spec.names.query_norm, self.head_dim)
        if self.qk_norm == "head" and norm.kind == "layer" and not norm.affine:
            return "the program norms queries and keys by layer norms with weights alone."
        if self.query_growth is not None and (self.qk_norm == "head" or self.clip_qkv is not None):
            return "the program scales queries by their positions before it norms or clips them."
        if self.qk_norm == "whole" and tp_size > 1:
            return "the program norms the queries of all heads as one row, and ranks have a part of it each."
        return ""


Kind = TypeVar("Kind", bound=Attention)


def as_kind(kind: type[Kind], mixer: Mixer, **own: Any) -> Kind:
    """A layer's attention, as `llama_like` builds it, as another kind that has further fields of its own."""
    assert isinstance(mixer, Attention), "as llama_like builds it"
    return kind(**{each.name: getattr(mixer, each.name) for each in fields(mixer)}, **own)


@dataclass(frozen=True, kw_only=True)
class FactorisedAttention(Attention):
    """Attention whose queries are computed through a vector of fewer columns, which is normed (multi-matrix
    factorisation: Hu et al. 2024)."""

    query_rank: int
    """Columns of that vector."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, found = spec.names, dict(super().declare(spec))
        qkv = found.pop("qkv")
        assert isinstance(qkv, Linear)
        (_, queries), *keys_and_values = qkv.matrices
        found["keys_and_values"] = replace(qkv, matrices=tuple(keys_and_values))
        found["query_down"] = Linear(((names.query_down, self.query_rank),), spec.hidden_size)
        found["query_norm"] = Norm.of(spec, names.query_down_norm, self.query_rank)
        found["query"] = Linear(((names.query_up, queries),), self.query_rank)
        found["joined"] = JoinedColumns()
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        queries = ops.linear(held["query"], ops.norm(held["query_norm"], ops.linear(held["query_down"], x)))
        qkv = ops.compute(held["joined"], queries, ops.linear(held["keys_and_values"], x))
        return [ops.product(held["output"], ops.mix(held["attend"], qkv))]

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + self.query_rank

    def problem(self) -> str:
        if self.query_rank < 1:
            return f"query_rank must be at least 1, got {self.query_rank}"
        return super().problem()


@dataclass(frozen=True)
class HeadNormedAttention(Attention):
    """Attention in which each head's norms of queries and keys have weights of their own."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, found = spec.names, dict(super().declare(spec))
        qkv, heads = found.pop("qkv"), Axis(self.num_heads, groups=self.num_kv_heads)
        assert isinstance(qkv, Linear)
        for name, matrix in zip(("queries", "keys", "values"), qkv.matrices, strict=True):
            found[name] = replace(qkv, matrices=(matrix,))
        found["query_norms"] = HeadNorms(names.query_norm, heads, self.head_dim, spec.norm.eps)
        found["key_norms"] = HeadNorms(names.key_norm, Axis(self.num_kv_heads), self.head_dim, spec.norm.eps)
        found["joined"] = JoinedColumns()
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        queries = ops.compute(held["query_norms"], ops.linear(held["queries"], x))
        keys = ops.compute(held["key_norms"], ops.linear(held["keys"], x))
        qkv = ops.compute(held["joined"], queries, keys, ops.linear(held["values"], x))
        return [ops.product(held["output"], ops.mix(held["attend"], qkv))]
