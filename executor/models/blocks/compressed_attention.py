"""DeepSeek V4's attention (DeepSeek-AI 2026, DeepSeek-V4, section 2.3): to a window of keys that are values too, and to
entries that windows of tokens are compressed to, of which an index may choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, RopeSpec, TokenCache
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, Mixer, Norm, Vector, Weight
from headrace.executor.models.blocks.hyper_connections import ExactMatrix
from headrace.ipc.failure import ModelError


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How windows of tokens are compressed to entries, and by which entries are chosen."""

    rate: int
    """Tokens of a window."""
    overlaps: bool
    """Whether an entry is of the window before, too: each token then has values and logits for two entries."""
    num_chosen: int | None = None
    """How many entries an index chooses; None: all are attended to."""
    index_heads: int = 0
    index_dim: int = 0

    def size(self, head_dim: int) -> int:
        """Columns of a token's values, and of its logits."""
        return head_dim * (2 if self.overlaps else 1)

    @property
    def index_size(self) -> int:
        """Likewise, for the index."""
        return self.size(self.index_dim) if self.num_chosen is not None else 0


@dataclass(frozen=True, kw_only=True)
class AttendCompressed(Declared):
    """See `kernels.reference.compressed`.

    mix(query, key) or, with a compression, mix(query, key, values, logits) or, with an index, mix(query, key, values,
    logits, index values, index logits, index queries, weights): head_dim columns per head, head_dim columns, ... and
    index_dim columns and one column per index head -> [num_tokens, heads * head_dim], rotated back."""

    eager_reader = "headrace.executor.models.eager_compressed:EagerCompressed"

    num_heads: int
    """Heads of all ranks together."""
    head_dim: int
    window: int
    scale: float
    eps: float
    """Of the norm of each head's query, which has no weights."""
    rope: RopeSpec
    """Of the last dimensions, 2i with 2i + 1."""
    sinks: Vector
    compression: Compression | None
    bias: ExactMatrix | None
    """[rate, columns], added to logits; index_bias likewise."""
    norm: Norm | None
    """Of entries; index_norm likewise."""
    index_bias: ExactMatrix | None
    index_norm: Norm | None

    def weights(self) -> Iterator[Weight]:
        for each in (self.sinks, self.bias, self.norm, self.index_bias, self.index_norm):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True)
class GroupedLinear(Declared):
    """compute(x): groups of neighbouring columns, each multiplied by a matrix of its own, side by side."""

    eager_reader = "headrace.executor.models.eager_compressed:EagerGroupedLinear.read"

    name: str
    num_groups: int
    rows: int
    """Of each group's matrix."""
    columns: int

    @property
    def axis(self) -> Axis:
        return Axis(self.num_groups * self.rows, unit=self.rows)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", (self.axis, self.columns), "matrix")


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Mixer):
    """A token's vector in the cache has its key, then what entries and the index's keys are computed of. Ranks divide
    the groups of heads; each has the keys, the entries and the index whole."""

    cpu_alone = "attention to compressed keys"

    num_heads: int
    head_dim: int
    window: int
    query_rank: int
    num_groups: int
    """Groups of heads, whose results are projected apart before the output projection."""
    group_rank: int
    """Size of the projection of a group."""
    eps: float
    rope: RopeSpec
    compression: Compression | None = None

    @property
    def sliding_window(self) -> int | None:  # type: ignore[override]
        return self.window if self.compression is None else None

    @property
    def cache(self) -> TokenCache:
        return TokenCache(1, self.head_dim + self._kept_for_entries, 0)

    @property
    def _kept_for_entries(self) -> int:
        found = self.compression
        return 0 if found is None else 2 * (found.size(self.head_dim) + found.index_size)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        hidden, dim, at = spec.hidden_size, self.head_dim, "self_attn.compressor"
        heads, group = Axis(self.num_heads * dim, unit=dim), self.num_heads // self.num_groups * dim
        found: dict[str, Declared] = {
            "query_down": Linear((("self_attn.q_a_proj", self.query_rank),), hidden),
            "query_norm": self._norm("self_attn.q_a_norm", self.query_rank),
            "query": Linear((("self_attn.q_b_proj", heads),), self.query_rank),
            "key": Linear((("self_attn.kv_proj", dim),), hidden),
            "key_norm": self._norm("self_attn.kv_norm", dim),
            "groups": GroupedLinear("self_attn.o_a_proj", self.num_groups, self.group_rank, group),
        }
        found["output"] = Linear(
            (("self_attn.o_b_proj", hidden),), Axis(self.num_groups * self.group_rank, self.group_rank)
        )
        compression, parts = self.compression, dict[str, Any]()
        if compression is not None:
            parts |= self._compressor(found, hidden, at, dim)
        if compression is not None and compression.num_chosen is not None:
            index, size = f"{at}.indexer", compression.index_heads * compression.index_dim
            own = self._compressor(found, hidden, index, compression.index_dim, "index_")
            parts |= {f"index_{key}": each for key, each in own.items()}
            found["index_queries"] = Linear(((f"{index}.q_b_proj", size),), self.query_rank)
            found["index_weights"] = Linear(
                ((f"{index}.scorer.weights_proj", compression.index_heads),), hidden, role="router"
            )
        found["attend"] = AttendCompressed(
            num_heads=self.num_heads,
            head_dim=dim,
            window=self.window,
            scale=dim**-0.5,
            eps=self.eps,
            rope=self.rope,
            sinks=Vector(spec.names.sinks, Axis(self.num_heads)),
            compression=compression,
            **({"bias": None, "norm": None, "index_bias": None, "index_norm": None} | parts),
        )
        return found

    def _compressor(
        self, found: dict[str, Declared], hidden: int, at: str, dim: int, start: str = ""
    ) -> dict[str, Any]:
        """Adds the projections to values and logits under keys with this start; returns the rest."""
        assert self.compression is not None
        size = self.compression.size(dim)
        found[f"{start}values"] = Linear(((f"{at}.kv_proj", size),), hidden)
        found[f"{start}logits"] = Linear(((f"{at}.gate_proj", size),), hidden)
        bias = ExactMatrix(f"{at}.position_bias", self.compression.rate, size)
        return {"bias": bias, "norm": self._norm(f"{at}.kv_norm", dim)}

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(name, size, "rms", self.eps, weight_offset=0.0, affine=True)

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        down = ops.norm(held["query_norm"], ops.linear(held["query_down"], x))
        given = [ops.linear(held["query"], down), ops.norm(held["key_norm"], ops.linear(held["key"], x))]
        given += [
            ops.linear(held[key], x) for key in ("values", "logits", "index_values", "index_logits") if key in held
        ]
        if "index_queries" in held:
            given += [ops.linear(held["index_queries"], down), ops.linear(held["index_weights"], x)]
        attended = ops.mix(held["attend"], *given)
        return [ops.product(held["output"], ops.compute(held["groups"], attended))]

    def for_ranks(self, tp_size: int, inner_block: int) -> CompressedAttention:
        if self.num_groups % tp_size:
            raise ModelError(
                f"{self.num_groups} groups of attention heads cannot be divided among {tp_size} ranks; choose a divisor"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        """Queries, results and their rotations; keys, and what is kept for entries."""
        found = self.compression
        index = 0 if found is None else found.index_heads * found.index_dim
        kept = 2 * (self.head_dim + self._kept_for_entries)
        return self.num_heads // tp_size * self.head_dim * 4 + kept + index + 2 * self.query_rank

    def problem(self) -> str:
        sizes: dict[str, int] = {
            name: getattr(self, name)
            for name in ("num_heads", "head_dim", "window", "query_rank", "num_groups", "group_rank")
        }
        if (found := self.compression) is not None:
            sizes["compression rate"] = found.rate
            if found.num_chosen is not None:
                sizes |= {"index_topk": found.num_chosen, "index heads": found.index_heads}
                if found.index_dim < self.rope.rotary_dim:
                    return f"index keys of {found.index_dim} dimensions cannot have {self.rope.rotary_dim} rotary ones"
        for name, value in sizes.items():
            if value < 1:
                return f"compressed attention's {name} must be at least 1, got {value}"
        if self.num_heads % self.num_groups:
            return f"{self.num_heads} attention heads are not divided evenly by {self.num_groups} groups"
        if self.rope.kind not in ("default", "linear", "yarn"):
            return f"entries are not rotated by rope of the kind {self.rope.kind}"
        return "" if 0 < self.eps < math.inf else f"eps must be positive, got {self.eps}"

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program has no compressed keys."
