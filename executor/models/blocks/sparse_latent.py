"""Latent attention to the keys that an index chooses (DeepSeek Sparse Attention: DeepSeek-AI 2025, DeepSeek-V3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import AttendLatent, Axis, Declared, Held, LayerOps, Linear, Norm, Vector, Weight
from headrace.executor.models.blocks.hyper_connections import ExactMatrix
from headrace.executor.models.blocks.latent import LatentAttention

INDEX_EPS = 1e-6
"""eps of the layer norm of index keys."""
POOL = "index_kpool_compress"
"""What the names of the weights of pools begin with."""


@dataclass(frozen=True, kw_only=True)
class AttendChosen(AttendLatent):
    """`AttendLatent` to at most `num_chosen` keys of each query's context: see `kernels.reference.sparse`.

    mix(query, latent) or, where the layer has an index of its own, mix(query, latent, index queries, index keys,
    weights): index_dim columns per index head, index_dim columns, and a column per index head; and with pools, a
    further index_dim columns: the keys' logits in the weighted sums that are their pools' keys."""

    eager_reader = "headrace.executor.models.eager_sparse:EagerChosen"
    program_reader = ""

    num_chosen: int
    index: Literal["none", "halves", "pairs"]
    """Whether the layer has no index of its own, but attends to what the layer before it with one chose; or else how
    index queries and keys are rotated: dimension i with i + rope_dim / 2, or 2i with 2i + 1."""
    index_heads: int
    index_dim: int
    index_rotates_last: bool = False
    """Whether the last dimensions of index queries and keys are rotated, instead of the first."""
    sinks: Vector | None = None
    """As of `Attend`."""
    pool_size: int = 1
    """Of so many neighbouring keys, all are chosen or none, by a key of all: see `kernels.reference.sparse`."""
    pool_bias: ExactMatrix | None = None
    """[pool_size, index_dim], added to the logits."""

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        for each in (self.sinks, self.pool_bias):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True, kw_only=True)
class SparseLatentAttention(LatentAttention):
    """The index keys, and behind them with pools their logits, are the last elements of a token's vector in the cache.
    Ranks divide the heads; each has the whole index, so that all choose alike."""

    cpu_alone = "attention to keys that an index chooses"

    num_chosen: int
    index: Literal["none", "halves", "pairs"]
    index_heads: int
    index_dim: int
    index_rotates_last: bool = False
    index_eps: float = INDEX_EPS
    sinks: bool = False
    """Whether each head has an attention sink."""
    pool_size: int = 1

    @property
    def follows(self) -> bool:
        return not self.has_index

    @property
    def has_index(self) -> bool:
        return self.index != "none"

    @property
    def cache(self) -> TokenCache:
        return TokenCache(1, self.latent_dim + self.rope_dim + self._kept_for_index, 0)

    @property
    def _kept_for_index(self) -> int:
        return self.index_dim * (2 if self.pool_size > 1 else 1) * self.has_index

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, hidden = dict(super().declare(spec)), spec.hidden_size
        at, dim, pools = "self_attn.indexer", self.index_dim, self.pool_size > 1
        plain = found["attend"]
        assert isinstance(plain, AttendLatent)
        found["attend"] = AttendChosen(
            **vars(plain),
            num_chosen=self.num_chosen,
            index=self.index,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            index_rotates_last=self.index_rotates_last,
            sinks=Vector(spec.names.sinks, Axis(self.num_heads)) if self.sinks else None,
            pool_size=self.pool_size,
            pool_bias=ExactMatrix(f"{at}.{POOL}_ape", self.pool_size, dim) if self.has_index and pools else None,
        )
        if not self.has_index:
            return found
        if pools:
            found["index_gates"] = Linear(((f"{at}.{POOL}_gate", dim),), hidden)
        queries = Linear(((f"{at}.wq_b", self.index_heads * dim),), self.query_rank or hidden)
        return found | {
            "index_queries": queries,
            "index_keys": Linear(((f"{at}.wk", dim),), hidden),
            "index_norm": Norm(f"{at}.k_norm", dim, "layer", self.index_eps, 0.0, affine=True, bias=True),
            "index_weights": Linear(((f"{at}.weights_proj", self.index_heads),), hidden, role="router"),
        }

    def _emit_index(self, ops: LayerOps, held: Held, x: Any, down: Any) -> Sequence[Any]:
        if not self.has_index:
            return ()
        keys = ops.norm(held["index_norm"], ops.linear(held["index_keys"], x))
        index = (ops.linear(held["index_queries"], down), keys, ops.linear(held["index_weights"], x))
        return index if self.pool_size == 1 else (*index, ops.linear(held["index_gates"], x))

    def values_per_token(self, tp_size: int) -> int:
        index = (self.index_heads + 1) * self.index_dim * self.has_index + self._kept_for_index
        return super().values_per_token(tp_size) + index

    def problem(self) -> str:
        for name in ("num_chosen", "index_heads", "index_dim", "pool_size"):
            if getattr(self, name) < 1:
                return f"the attention index's {name} must be at least 1, got {getattr(self, name)}"
        if self.num_chosen % self.pool_size:
            return f"{self.num_chosen} keys are no whole number of pools of {self.pool_size}"
        if self.index_dim < self.rope_dim:
            return f"index keys of {self.index_dim} dimensions cannot have {self.rope_dim} rotary ones"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program chooses no keys by an index."
