"""Grouped-query attention to blocks of keys that an index chooses (MiniMax M3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import Attend, Declared, Held, LayerOps, Linear, Norm, Weight
from headrace.executor.models.blocks.attention import Attention
from headrace.ipc.failure import ModelError


@dataclass(frozen=True, kw_only=True)
class AttendIndexed(Attend):
    """`Attend` to what an index chooses, whose queries and keys are normed."""

    program_reader = ""

    index_query_norm: Norm
    index_key_norm: Norm

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self.index_query_norm.weights()
        yield from self.index_key_norm.weights()


@dataclass(frozen=True, kw_only=True)
class AttendBlocks(AttendIndexed):
    """`Attend` to at most `num_blocks` blocks of each query's context: see `kernels.reference.sparse`.

    mix(qkv, index queries, index keys): head_dim columns per index head, and head_dim columns. The index key is the key
    of one further head in the cache."""

    eager_reader = "headrace.executor.models.eager_sparse:EagerBlocks"

    block_size: int
    num_blocks: int
    local_blocks: int
    """Blocks, from a query's own back, that are always among those."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Attention):
    cpu_alone = "attention to blocks that an index chooses"

    index_heads: int
    index: str = "self_attn.index_"
    """What the names of the index's weights begin with."""
    block_size: int
    num_blocks: int
    local_blocks: int

    @property
    def cache(self) -> TokenCache:
        return TokenCache(self.num_kv_heads + 1, self.head_dim, self.head_dim)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, hidden, dim = dict(super().declare(spec)), spec.hidden_size, self.head_dim
        plain, at = found["attend"], self.index
        assert isinstance(plain, Attend)
        found["attend"] = AttendBlocks(
            **vars(plain),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            local_blocks=self.local_blocks,
            index_query_norm=Norm.of(spec, f"{at}q_norm", dim),
            index_key_norm=Norm.of(spec, f"{at}k_norm", dim),
        )
        return found | {
            "index_queries": Linear(((f"{at}q_proj", self.index_heads * dim),), hidden),
            "index_keys": Linear(((f"{at}k_proj", dim),), hidden),
        }

    def attended(self, ops: LayerOps, held: Held, qkv: Any, x: Any) -> Any:
        return ops.mix(held["attend"], qkv, *(ops.linear(held[key], x) for key in ("index_queries", "index_keys")))

    def for_ranks(self, tp_size: int, inner_block: int) -> SparseAttention:
        if tp_size > 1:
            raise ModelError(
                "tensor-parallel ranks cannot divide attention to blocks that an index chooses: choose "
                "pipeline_parallel_size, or one rank"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + 2 * (self.index_heads + 1) * self.head_dim

    def problem(self) -> str:
        for name in ("index_heads", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                return f"sparse attention's {name} must be at least 1, got {getattr(self, name)}"
        if self.num_heads % self.index_heads:
            return f"{self.num_heads} attention heads cannot share {self.index_heads} index heads evenly"
        if self.local_blocks > self.num_blocks:
            return f"{self.local_blocks} local blocks cannot be among {self.num_blocks} chosen ones"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program chooses no blocks of keys by an index."
