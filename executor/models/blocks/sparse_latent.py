"""Latent attention to the keys that an index chooses (DeepSeek Sparse Attention: DeepSeek-AI 2025, DeepSeek-V3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import AttendLatent, Declared, Held, LayerOps, Linear, Norm
from headrace.executor.models.blocks.latent import LatentAttention

INDEX_EPS = 1e-6
"""eps of the layer norm of index keys."""


@dataclass(frozen=True, kw_only=True)
class AttendChosen(AttendLatent):
    """`AttendLatent` to at most `num_chosen` keys of each query's context: see `kernels.reference.sparse`.

    mix(query, latent) or, where the layer has an index of its own, mix(query, latent, index queries, index keys,
    weights): index_dim columns per index head, index_dim columns, and a column per index head."""

    eager_reader = "headrace.executor.models.eager_sparse:EagerChosen"
    program_reader = ""

    num_chosen: int
    index: Literal["none", "halves", "pairs"]
    """Whether the layer has no index of its own, but attends to what the layer before it with one chose; or else how
    index queries and keys are rotated: dimension i with i + rope_dim / 2, or 2i with 2i + 1."""
    index_heads: int
    index_dim: int


@dataclass(frozen=True, kw_only=True)
class SparseLatentAttention(LatentAttention):
    """The index keys are the last elements of a token's vector in the cache. Ranks divide the heads; each has the whole
    index, so that all choose alike."""

    cpu_alone = "attention to keys that an index chooses"

    num_chosen: int
    index: Literal["none", "halves", "pairs"]
    index_heads: int
    index_dim: int

    @property
    def follows(self) -> bool:
        return not self.has_index

    @property
    def has_index(self) -> bool:
        return self.index != "none"

    @property
    def cache(self) -> TokenCache:
        return TokenCache(1, self.latent_dim + self.rope_dim + self.index_dim * self.has_index, 0)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, hidden = dict(super().declare(spec)), spec.hidden_size
        plain = found["attend"]
        assert isinstance(plain, AttendLatent)
        found["attend"] = AttendChosen(
            **vars(plain),
            num_chosen=self.num_chosen,
            index=self.index,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
        )
        if not self.has_index:
            return found
        at, dim = "self_attn.indexer", self.index_dim
        queries = Linear(((f"{at}.wq_b", self.index_heads * dim),), self.query_rank or hidden)
        return found | {
            "index_queries": queries,
            "index_keys": Linear(((f"{at}.wk", dim),), hidden),
            "index_norm": Norm(f"{at}.k_norm", dim, "layer", INDEX_EPS, 0.0, affine=True, bias=True),
            "index_weights": Linear(((f"{at}.weights_proj", self.index_heads),), hidden, role="router"),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        down = ops.norm(held["query_norm"], ops.linear(held["query_down"], x)) if self.query_rank else x
        query = ops.linear(held["query"], down)
        latent = ops.norm(held["latent_norm"], ops.linear(held["latent"], x), 0, self.latent_dim)
        index: tuple[Any, ...] = ()
        if self.has_index:
            keys = ops.norm(held["index_norm"], ops.linear(held["index_keys"], x))
            index = ops.linear(held["index_queries"], down), keys, ops.linear(held["index_weights"], x)
        return [ops.product(held["output"], ops.mix(held["attend"], query, latent, *index))]

    def values_per_token(self, tp_size: int) -> int:
        index = (self.index_heads + 2) * self.index_dim * self.has_index
        return super().values_per_token(tp_size) + index

    def problem(self) -> str:
        for name in ("num_chosen", "index_heads", "index_dim"):
            if getattr(self, name) < 1:
                return f"the attention index's {name} must be at least 1, got {getattr(self, name)}"
        if self.index_dim < self.rope_dim:
            return f"index keys of {self.index_dim} dimensions cannot have {self.rope_dim} rotary ones"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program chooses no keys by an index."
