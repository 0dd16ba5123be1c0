"""Latent attention (MLA: DeepSeek-V2, section 2.1): all heads share one compressed vector per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from headrace.executor.models.arch import ArchSpec, RopeSpec, TokenCache
from headrace.executor.models.blocks import (
    AttendLatent,
    Axis,
    Declared,
    Held,
    LayerOps,
    Linear,
    Mixer,
    Norm,
    rounded_up,
)
from headrace.executor.models.blocks.attention import growth_within
from headrace.executor.models.blocks.gated_norm import OutputGate
from headrace.ipc.failure import ModelError

LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentAttention(Mixer):
    num_heads: int
    nope_dim: int
    """Dimensions of a head's query and key without rotary positions."""
    rope_dim: int
    """Rotary dimensions of a head's query, and of the rotary key that all heads share."""
    value_dim: int
    latent_dim: int
    """Size of the compressed vector."""
    scale: float
    """Multiplies the scores (products of queries and keys)."""
    rope: RopeSpec | None
    """None: there are no rotary dimensions."""
    interleaved: bool = True
    """Whether dimension 2i is rotated with 2i + 1, instead of i with i + rope_dim / 2."""
    query_rank: int | None = None
    """Size of the compressed vector of queries; None: queries are not compressed."""
    bias: bool = False
    """Whether the down-projections and the output projection have biases."""
    gate: Literal["none", "head", "value"] = "none"
    """Whether each head's result, or each of its values, is multiplied by a gate of its own."""
    query_growth: tuple[int, float, int] | None = None
    """As of `Attention`."""
    latent_eps: float = LATENT_EPS
    """eps of the norms of compressed vectors; the model's other norms may have another."""
    sliding_window: int | None = None
    query_scale: float = 1.0
    """Multiplies the normed compressed vectors of queries; latent_scale the others."""
    latent_scale: float = 1.0
    rotary_key_norm: str = ""
    """Name of a norm of the rotary key before its rotation; empty: there is none."""

    @property
    def cache(self) -> TokenCache:
        return TokenCache(1, self.latent_dim + self.rope_dim, 0)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, hidden = spec.names, spec.hidden_size
        head = self.nope_dim + self.rope_dim
        queries = Axis(self.num_heads * head, unit=head)
        found: dict[str, Declared] = {}
        if self.query_rank is None:
            found["query"] = Linear(((names.query, queries),), hidden)
        else:
            found["query_down"] = Linear(((names.query_down, self.query_rank),), hidden, self.bias)
            found["query_norm"] = self._norm(names.query_down_norm, self.query_rank, self.query_scale)
            found["query"] = Linear(((names.query_up, queries),), self.query_rank)
        found["latent"] = Linear(((names.latent_down, self.latent_dim + self.rope_dim),), hidden, self.bias)
        found["latent_norm"] = self._norm(names.latent_norm, self.latent_dim, self.latent_scale)
        if self.rotary_key_norm:
            found["rotary_norm"] = self._norm(self.rotary_key_norm, self.rope_dim)
        found["attend"] = AttendLatent(
            num_heads=self.num_heads,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            latent_dim=self.latent_dim,
            value_dim=self.value_dim,
            scale=self.scale,
            rope=self.rope,
            interleaved=self.interleaved,
            up=names.latent_up,
            query_growth=self.query_growth,
            sliding_window=self.sliding_window,
        )
        values = Axis(self.num_heads * self.value_dim, unit=self.value_dim)
        if self.gate != "none":
            of_head = self.gate == "head"
            found["gate"] = Linear(((names.query_gate, Axis(self.num_heads) if of_head else values),), hidden)
            found["gated"] = OutputGate("sigmoid", group=self.value_dim if of_head else 1)
        found["output"] = Linear(((names.output, hidden),), values, self.bias)
        return found

    def _norm(self, name: str, size: int, scale: float = 1.0) -> Norm:
        return Norm(name, size, "rms", self.latent_eps, weight_offset=0.0, affine=True, scale=scale)

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        down = ops.norm(held["query_norm"], ops.linear(held["query_down"], x)) if self.query_rank else x
        query = ops.linear(held["query"], down)
        latent = ops.norm(held["latent_norm"], ops.linear(held["latent"], x), 0, self.latent_dim)
        if "rotary_norm" in held:
            latent = ops.norm(held["rotary_norm"], latent, self.latent_dim, self.latent_dim + self.rope_dim)
        gate = ops.linear(held["gate"], x) if self.gate != "none" else None  # of all tokens, as the queries are
        attended = ops.mix(held["attend"], query, latent, *self._emit_index(ops, held, x, down))
        if gate is not None:
            attended = ops.compute(held["gated"], attended, gate)
        return [ops.product(held["output"], attended)]

    def _emit_index(self, ops: LayerOps, held: Held, x: Any, down: Any) -> Sequence[Any]:
        """What attention takes besides queries and compressed vectors. down: the compressed queries, or else x."""
        return ()

    def for_context(self, longest: int) -> Self:
        found = super().for_context(longest)
        return replace(found, query_growth=growth_within(found.query_growth, longest))

    def for_ranks(self, tp_size: int, inner_block: int) -> LatentAttention:
        """Pads heads to a multiple of tp_size: ranks divide the heads, and each has the whole compressed vectors."""
        if self.num_heads < tp_size:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be divided among {tp_size} ranks: each needs at least one"
            )
        return replace(self, num_heads=rounded_up(self.num_heads, tp_size))

    def values_per_token(self, tp_size: int) -> int:
        """Queries before and after absorption, attention's results in the latent space and as values, and the
        compressed vectors."""
        latent = self.latent_dim + self.rope_dim
        each = 2 * (self.nope_dim + self.rope_dim) + 2 * latent + 2 * self.value_dim
        return self.num_heads // tp_size * each + 3 * latent + 2 * (self.query_rank or 0)

    def problem(self) -> str:
        sizes = ["num_heads", "nope_dim", "value_dim", "latent_dim"]
        if self.query_rank is not None:
            sizes.append("query_rank")
        for name in sizes:
            if getattr(self, name) < 1:
                return f"latent attention's {name} must be at least 1, got {getattr(self, name)}"
        rotary_dim = 0 if self.rope is None else self.rope.rotary_dim
        if rotary_dim != self.rope_dim:
            return f"{rotary_dim} rotary dimensions are not the {self.rope_dim} of latent attention"
        if self.sliding_window is not None and self.sliding_window < 1:
            return f"a sliding window of {self.sliding_window}; it must be at least 1"
        if self.query_growth is not None and self.query_growth[0] < 1:
            return f"queries that grow every {self.query_growth[0]} positions; it must be at least 1"
        return "" if 0 < self.scale < math.inf else f"attention_scale must be positive, got {self.scale}"

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        if self.rope is None:
            return "the program's latent attention has rotary dimensions."
        return "" if self.sliding_window is None else "the program's latent attention has no sliding windows."
