"""Attention in a CPU program: what the declared attention reads, and the ops that it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.executor.cpu.program import ProgramOps
from headrace.executor.cpu.weights import CpuDeltas, CpuWeights, PackedDeltas
from headrace.executor.models import blocks
from headrace.executor.models.blocks import Attend, AttendLatent
from headrace.executor.models.reading import own_part, own_slopes
from headrace.kernels.cpu.facade import NEVER, AttentionLayer, Buffer, LatentLayer, Norm, PackedLinear
from headrace.kernels.low_rank import LowRank, LowRankPart, factors_of_heads
from headrace.kernels.reference.attention import SinkRows


@dataclass(frozen=True)
class CpuAttend:
    """An `Attend` with the constants of its norms."""

    declared: Attend
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None
    sinks: Tensor | None
    """[heads of this rank] float32"""
    sink_tokens: SinkRows | None
    alibi: Tensor | None
    """[heads of this rank] float32"""
    distance_bias: Tensor | None
    """Of `CheckedWeights.distance_bias`."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: Attend, prefix: str) -> CpuAttend:
        norms = declared.query_norm, declared.key_norm, declared.value_norm
        query_norm, key_norm, value_norm = (_of_heads(weights, each, prefix) for each in norms)
        sinks = None if declared.sinks is None else weights.values(declared.sinks, prefix)
        tokens = None if declared.sink_tokens is None else weights.sink_tokens(declared.sink_tokens, prefix)
        bias = None if declared.distance_bias is None else weights.distance_bias(declared.distance_bias, prefix)
        slopes = own_slopes(declared, weights.place)
        return cls(declared, query_norm, key_norm, value_norm, sinks, tokens, slopes, bias)

    def write(self, ops: ProgramOps, qkv: Buffer) -> Buffer:
        declared, builder = self.declared, ops.builder
        num_heads = declared.num_heads // ops.place.tp_size
        attention = AttentionLayer(
            num_heads=num_heads,
            cache=ops.cache,
            scale=declared.scale,
            rotary=ops.rotary(declared.rope),
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            value_norm=self.value_norm,
            reads_only=declared.reads_only,
            keys_are_values=declared.keys_are_values,
            norm_after_rotation=declared.norm_after_rotation,
            clip_qkv=declared.clip_qkv,
            window=declared.sliding_window,
            soft_cap=declared.soft_cap,
            sinks=self.sinks,
            sink_tokens=self.sink_tokens,
            alibi=self.alibi,
            alibi_root=declared.alibi_root,
            chunk_size=declared.chunk_size,
            chunks_before=declared.chunks_before,
            grow_after=declared.grow_after,
            distance_bias=self.distance_bias,
            both_sides=not declared.causal,
        )
        attended = ops.room(num_heads * declared.head_dim, ops.inner)
        ops.scale_queries(qkv.part(0, num_heads * declared.head_dim), declared.query_growth)
        builder.write_cache(qkv, attention)
        builder.attend(qkv, attended, attention, only_logits=not declared.whole and ops.repeats_from_here())
        return attended if declared.whole else ops.narrowed(attended)


@dataclass(frozen=True)
class CpuLatent:
    """An `AttendLatent` with the up-projections from latent vectors to keys and values, by head of this rank."""

    declared: AttendLatent
    keys: tuple[PackedLinear, ...]
    """[latent_dim, nope_dim] each: the absorbed form multiplies queries with these, instead of computing keys."""
    values: tuple[PackedLinear, ...]
    """[value_dim, latent_dim] each"""
    up: Tensor
    """[heads of this rank, nope_dim + value_dim, latent_dim]: keys and values together, for the expanded form"""
    deltas: LatentDeltas | None = None
    """None where adapters cannot change them."""

    @classmethod
    def read(cls, weights: CpuWeights, declared: AttendLatent, prefix: str) -> CpuLatent:
        """Reads the up-projection in the model's dtype even where it is stored quantised: the absorbed form needs the
        transpose of its key part, the expanded form the part itself."""
        rows, name = declared.up_rows, f"{prefix}{declared.up}.weight"
        stacked = weights.matrix(name, rows.size, declared.latent_dim, own_part(rows, weights.place))
        heads = stacked.unflatten(0, (-1, declared.nope_dim + declared.value_dim))
        keys, values = heads.split((declared.nope_dim, declared.value_dim), dim=1)
        packed_keys = tuple(weights.pack(each.T.contiguous()) for each in keys)
        packed_values = tuple(weights.pack(each.contiguous()) for each in values)
        deltas = None
        if (limits := weights.adapters) is not None:
            by_head = CpuDeltas.of((*packed_keys, *packed_values), limits)
            deltas = LatentDeltas(by_head.tables, by_head.first_rows, declared)
            weights.adapter_tables[prefix + declared.up] = deltas
        return cls(declared, packed_keys, packed_values, heads, deltas)

    def write(self, ops: ProgramOps, query: Buffer, latent: Buffer) -> Buffer:
        """Uses the absorbed form, which reads each cached vector once for all heads. Sequences that compute many tokens
        use the expanded form, which multiplies less per token, except in the last layer, which needs few rows of any
        sequence, and in batch-invariant programs, since the two forms add up in different orders."""
        declared, builder = self.declared, ops.builder
        rotary, num_heads = ops.rotary(declared.rope), len(self.keys)
        assert rotary is not None, "latent attention rotates"
        layer = LatentLayer(
            num_heads, declared.nope_dim, ops.cache, declared.scale, rotary, interleaved=declared.interleaved
        )
        ops.scale_queries(query, declared.query_growth)
        absorbed = ops.room(num_heads * layer.vector_dim, torch.float32)
        tables = (None,) * (2 * num_heads) if self.deltas is None else self.deltas.tables
        for head, weight in enumerate(self.keys):
            own = query.part(head * layer.head_dim, declared.nope_dim)
            to = absorbed.part(head * layer.vector_dim, declared.latent_dim)
            builder.linear(weight, own, to, deltas=tables[head])
        builder.write_latent(query, absorbed, latent, layer)
        attended = ops.room(num_heads * declared.latent_dim, ops.inner)
        only_logits = ops.repeats_from_here()
        least = NEVER if only_logits or ops.batch_invariant else layer.least_expanded(declared.value_dim)
        builder.attend_latent(
            absorbed, attended, layer, most_tokens=least - 1, only_logits=only_logits, adapted=tables[0]
        )
        compressed = ops.narrowed(attended, own=False)
        out = ops.room(num_heads * declared.value_dim, ops.inner)
        for head, weight in enumerate(self.values):
            own = compressed.part(head * declared.latent_dim, declared.latent_dim)
            to = out.part(head * declared.value_dim, declared.value_dim)
            builder.linear(weight, own, to, deltas=tables[num_heads + head])
        if least < NEVER:
            builder.attend_expanded(query, absorbed, latent, out, layer, self.up, adapted=tables[0])
        return out


@dataclass(frozen=True)
class LatentDeltas(CpuDeltas):
    """The adapters of the up-projection of latent attention: tables of each head's keys, whose transpose the absorbed
    form multiplies with, then of each head's values."""

    declared: AttendLatent

    def pack(self, delta: LowRank) -> PackedDeltas:
        """delta: of the rows of this rank's heads, nope_dim for keys, then value_dim for values, each."""
        declared = self.declared
        keys, values = factors_of_heads(delta, declared.nope_dim, declared.value_dim)
        turned = LowRankPart(0, 0, delta.a.T)
        each = [
            *(LowRank(declared.latent_dim, own.T.contiguous(), (turned,)) for own in keys),
            *(LowRank(declared.value_dim, delta.a, (LowRankPart(0, 0, own),)) for own in values),
        ]
        return PackedDeltas(tuple(table.pack(own) for table, own in zip(self.tables, each, strict=True)))


def _of_heads(weights: CpuWeights, declared: blocks.Norm | None, prefix: str) -> Norm | None:
    """A norm's constants, always with weights, which the kernels multiply by."""
    if declared is None:
        return None
    norm = weights.norm(declared, prefix)
    found = norm.constants
    return found if found.weight is not None else replace(found, weight=torch.ones(norm.columns))
