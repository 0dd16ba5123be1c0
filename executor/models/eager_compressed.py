"""What `blocks.compressed_attention` and `blocks.hashed_experts` declare, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.blocks.compressed_attention import AttendCompressed, GroupedLinear
from headrace.executor.models.blocks.hashed_experts import HashedExperts, HashTable
from headrace.executor.models.eager import EagerExperts, EagerNorm, EagerWeights, SharedInputs
from headrace.executor.models.reading import Part, own_part
from headrace.executor.models.rotary import inverse_frequencies
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import AttentionParams, gather_tokens
from headrace.kernels.reference.compressed import attend_compressed, compress, rotate_pairs
from headrace.kernels.reference.moe import scores_of, shares_of
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.sparse import highest_scores


class EagerCompressed:
    """An `AttendCompressed` with its kernels. Of a layer without entries, the kernels for windows attend."""

    def __init__(self, weights: EagerWeights, declared: AttendCompressed, prefix: str) -> None:
        self._own, self._num_heads = declared, declared.num_heads // weights.place.tp_size
        self._rope_index = weights.ropes.index(declared.rope)
        self._frequencies = inverse_frequencies(declared.rope).to(weights.device)
        self._sinks: Tensor = weights.read(declared.sinks, prefix)
        self._params = AttentionParams(declared.scale, declared.window, sinks=self._sinks)
        self._rms_norm = weights.kernel("rms_norm", size=declared.head_dim)
        self._ones = torch.ones(declared.head_dim, device=weights.device)
        self._parts: list[tuple[Tensor, EagerNorm]] = []
        """Of the entries, and of the index's keys."""
        pairs = ((declared.bias, declared.norm), (declared.index_bias, declared.index_norm))
        for bias, norm in pairs:
            if bias is not None and norm is not None:
                self._parts.append((weights.read(bias, prefix), EagerNorm(weights, norm, prefix)))
        self._write = weights.kernel("write_cache", head_dim=declared.head_dim)
        self._attend = weights.kernel(
            "paged_attention",
            **{"head_dim": declared.head_dim, "num_heads": self._num_heads, "num_kv_heads": 1},
            has_alibi=False,
            is_causal=True,
        )

    def __call__(self, query: Tensor, key: Tensor, *values: Any) -> Tensor:
        *given, step, cache = values
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        own, batch, (cos, sin) = self._own, step.batch, step.cos_sin[self._rope_index]
        query, _ = self._rms_norm(query.view(len(query), self._num_heads, own.head_dim), None, self._ones, own.eps)
        query, key = rotate_pairs(query, cos, sin), rotate_pairs(key[:, None], cos, sin)
        index = given[4:]
        vector = torch.cat([key, *(each[:, None] for each in given[:4])], dim=-1)
        self._write(vector, vector, cache.keys, cache.values, batch, cache.scales)
        if own.compression is None:
            out = self._attend(query, cache.keys, cache.values, batch, self._params, cache.scales)
        else:
            out = torch.zeros_like(query)
            for seq, length in enumerate(batch.context_lens):
                tokens = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
                if length and tokens.stop > tokens.start:
                    context = gather_tokens(query.dtype, cache.keys, cache.scales, batch, seq)
                    here = [each[tokens] for each in (cos, sin, *index)]
                    out[tokens] = self._attended(query[tokens], context, *here)
        return rotate_pairs(out, cos, -sin).flatten(1)

    def _attended(self, query: Tensor, context: Tensor, cos: Tensor, sin: Tensor, *index: Tensor) -> Tensor:
        """Of one sequence's tokens. context [length, elements of a token]; index: queries and weights, if there is one
        -> as query"""
        own, found = self._own, self._own.compression
        assert found is not None
        size, head = found.size(own.head_dim), own.head_dim
        entries = self._entries(context[:, head : head + 2 * size], 0)
        ends = torch.arange(len(context) - len(query) + 1, len(context) + 1, device=context.device)
        if index and found.num_chosen is not None:
            keys = self._entries(context[:, head + 2 * size :], 1)
            queries = rotate_pairs(index[0].view(len(query), found.index_heads, found.index_dim), cos, sin)
            chosen = highest_scores(queries, index[1], keys, ends // found.rate, found.num_chosen)
        else:
            chosen = torch.arange(len(entries), device=context.device) < (ends // found.rate)[:, None]
        return attend_compressed(query, context[:, :head], entries, chosen, own.window, own.scale, self._sinks)

    def _entries(self, kept: Tensor, part: int) -> Tensor:
        """kept [length, 2 * columns]: values, then logits -> [count, columns of an entry], rotated as
        its first token"""
        found, (bias, norm) = self._own.compression, self._parts[part]
        assert found is not None
        values, logits = kept.chunk(2, dim=-1)
        entries = compress(values, logits, bias, overlap=found.overlaps).to(kept.dtype)
        if not len(entries):
            return entries
        normed, _ = norm(entries)
        positions = torch.arange(len(entries), device=kept.device, dtype=torch.float32) * found.rate
        angles, factor = positions[:, None] * self._frequencies, self._own.rope.attention_factor
        return rotate_pairs(normed[:, None], angles.cos() * factor, angles.sin() * factor)[:, 0]


@dataclass(frozen=True)
class EagerGroupedLinear:
    """A `GroupedLinear`'s matrices of this rank."""

    weight: Tensor  # [groups, columns, rows]

    @classmethod
    def read(cls, weights: EagerWeights, declared: GroupedLinear, prefix: str) -> EagerGroupedLinear:
        name, axis = prefix + declared.name, declared.axis
        part = Part(name, axis.size, own_part(axis, weights.place))
        stacked = weights.stack([(f"{name}.weight", part)], declared.columns, None)
        weights.nbytes += stacked.nbytes
        return cls(stacked.unflatten(0, (-1, declared.rows)).transpose(1, 2).contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, groups * columns] -> [num_tokens, groups * rows]"""
        groups = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1)
        return torch.bmm(groups, self.weight).transpose(0, 1).flatten(1)


class EagerHashTable:
    """A `HashTable`."""

    def __init__(self, weights: EagerWeights, declared: HashTable, prefix: str) -> None:
        self._table = weights.integers(prefix + declared.name, (declared.vocab_size, declared.num_chosen))
        if int(self._table.min()) < 0 or int(self._table.max()) >= declared.num_experts:
            raise ModelError(f"weight {prefix}{declared.name} names experts outside 0 .. {declared.num_experts - 1}")

    def __call__(self, *values: Any) -> Tensor:
        """[num_tokens, num_chosen] int32"""
        step = values[-2]
        assert isinstance(step, SharedInputs)
        assert step.token_ids is not None
        return self._table[step.token_ids]


class EagerHashedExperts(EagerExperts):
    """A `HashedExperts` with its kernels."""

    def __init__(self, weights: EagerWeights, declared: HashedExperts, prefix: str) -> None:
        if weights.place.exchange is not None:
            raise ModelError("experts that token ids choose cannot be divided among engine cores")
        super().__init__(weights, declared, prefix)
        self._routing = declared.routing

    def __call__(self, x: Tensor, logits: Tensor, *values: Any) -> Tensor:
        """values: expert_ids [num_tokens, num_chosen] int32, then the step's inputs and the cache"""
        expert_ids, step, _ = values
        assert isinstance(step, SharedInputs)
        scores = scores_of(logits.float(), self._routing.scoring)
        shares = shares_of(scores, expert_ids, self._routing.scale)
        return self._computed(x, expert_ids, shares, step.replica_keys, step.adapters)
