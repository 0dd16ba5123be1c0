"""Grouped-query attention to pools of neighbouring keys, which an index chooses by the mean of index keys of their
tokens (Qwen4-Exp's "QSA")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import Attend, Declared, Held, LayerOps, Linear, Norm, Value
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.sparse_attention import AttendIndexed
from headrace.ipc.failure import ModelError

AT = "self_attn.indexer."


@dataclass(frozen=True, kw_only=True)
class AttendPools(AttendIndexed):
    """mix(qkv, index): `Attend` to the tokens of at most `num_pools` pools of `pool_size` tokens each that end at or
    before a query, and to those after the last of these pools. A pool's index key is the mean of its tokens', which is
    then normed, and rotated as its first token. index: index_dim columns per index head, and those of one key, which is
    cached as the key of one further head."""

    eager_reader = "headrace.executor.models.eager_sparse:EagerPools"

    index_dim: int
    pool_size: int
    num_pools: int


@dataclass(frozen=True, kw_only=True)
class PooledAttention(Attention):
    cpu_alone = "attention to pools of keys that an index chooses"

    index_heads: int
    index_dim: int
    pool_size: int
    num_pools: int
    index_copies: int = 1
    """Of the index's keys: each tensor-parallel rank computes and caches them."""

    @property
    def cache(self) -> TokenCache:
        return TokenCache(self.num_kv_heads + self.index_copies, self.head_dim, self.head_dim)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        plain = found["attend"]
        assert isinstance(plain, Attend), "as attention declares it"
        found["attend"] = AttendPools(
            **vars(plain),
            index_dim=self.index_dim,
            pool_size=self.pool_size,
            num_pools=self.num_pools,
            index_query_norm=Norm.of(spec, f"{AT}q_layernorm", self.index_dim),
            index_key_norm=Norm.of(spec, f"{AT}k_layernorm", self.index_dim),
        )
        columns = (self.index_heads + 1) * self.index_dim
        return found | {"index": Linear(((f"{AT}index_qk_proj", columns),), spec.hidden_size)}

    def attended(self, ops: LayerOps, held: Held, qkv: Value, x: Value) -> Any:
        return ops.mix(held["attend"], qkv, ops.linear(held["index"], x))

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        if self.num_kv_heads < tp_size:
            raise ModelError(
                f"{self.num_kv_heads} key/value heads beside the keys of an index cannot be divided among {tp_size} "
                "ranks: each needs at least one"
            )
        return replace(super().for_ranks(tp_size, inner_block), index_copies=tp_size)

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + 2 * (self.index_heads + 1) * self.index_dim

    def problem(self) -> str:
        for name in ("index_heads", "index_dim", "pool_size", "num_pools"):
            if getattr(self, name) < 1:
                return f"pooled attention's {name} must be at least 1, got {getattr(self, name)}"
        rotated, dim = 0 if self.rope is None else self.rope.rotary_dim, self.index_dim
        if not rotated <= dim <= self.head_dim:
            return (
                f"index heads of {dim} dimensions; from {rotated}, which are rotated, to {self.head_dim} are possible"
            )
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program chooses no pools of keys by an index."
