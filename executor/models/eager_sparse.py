"""What `blocks.sparse_latent`, `blocks.sparse_attention` and `blocks.pooled_attention` declare, op by op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace.executor.models.blocks.pooled_attention import AttendPools
from headrace.executor.models.blocks.sparse_attention import AttendBlocks, AttendIndexed
from headrace.executor.models.blocks.sparse_latent import AttendChosen
from headrace.executor.models.eager import EagerAttend, EagerLatent, EagerNorm, EagerWeights, SharedInputs
from headrace.executor.models.rotary import inverse_frequencies
from headrace.kernels.reference.attention import gather_heads, gather_tokens
from headrace.kernels.reference.latent import without_sequences
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.sparse import (
    attend_blocks,
    attend_chosen,
    attend_chosen_adapted,
    choose_blocks,
    choose_keys,
    choose_means,
    choose_pools,
)

CHOSEN = "chosen keys"
"""Key of `SharedInputs.memo`: the last choice of a layer with an index, by sequence."""


class EagerChosen(EagerLatent):
    """An `AttendChosen` with its kernels."""

    def __init__(self, weights: EagerWeights, declared: AttendChosen, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._own = declared
        self._index_size = declared.index_dim * (2 if declared.pool_size > 1 else 1) * (declared.index != "none")
        self._sinks = None if declared.sinks is None else weights.read(declared.sinks, prefix)
        self._pool_bias = None if declared.pool_bias is None else weights.read(declared.pool_bias, prefix)
        # The kernels for dense attention have no sinks, and attend to incomplete pools' tokens besides the chosen ones.
        self._most_dense = declared.num_chosen if self._sinks is None and declared.pool_size == 1 else 0

    def __call__(self, query: Tensor, latent: Tensor, *values: object) -> Tensor:
        """As `EagerLatent`, with the index's queries, keys and weights before the step's inputs and the cache, if the
        layer has an index."""
        *index, step, cache = values
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        query, vector = self.rotated(query, latent, step)
        if index:
            queries, keys, weights, *logits = (each for each in index if isinstance(each, Tensor))
            queries, keys = self._rotated_index(queries, keys, step)
            vector = torch.cat([vector, keys, *(each[:, None] for each in logits)], dim=-1)
        self._write(vector, vector, cache.keys, cache.values, step.batch, cache.scales)
        batch = step.batch
        long = [seq for seq, length in enumerate(batch.context_lens) if length > self._most_dense]
        dense = without_sequences(batch, long) if long else batch
        padded = functional.pad(query, (0, self._index_size))
        out, adapted = torch.empty(0), self._adapted(step)
        if self._most_dense and len(long) < len(batch.context_lens):
            read = padded, self._up, cache.keys, dense, self._params, cache.scales
            out = self._attend(*read)
            if adapted is not None:
                out[adapted.rows] = adapted.deltas.attention(*read, adapted.adapters)[adapted.rows]
        else:
            out = query.new_zeros(*query.shape[:2], self._own.value_dim)
        choices: dict[int, Tensor] = {} if index else step.memo[CHOSEN]
        for seq in long:
            tokens = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
            context = gather_tokens(query.dtype, cache.keys, cache.scales, batch, seq)
            width = context.shape[1] - self._index_size
            if index:
                choices[seq] = self._choose(queries[tokens], weights[tokens], context[:, width:])
            given = context[:, :width], choices[seq], self._params.scale, self._sinks
            out[tokens] = attend_chosen(query[tokens], self._up, *given)
            if adapted is not None and len(rows := adapted.within(tokens)):
                others = adapted.deltas, adapted.adapters.of(tokens)
                out[rows] = attend_chosen_adapted(query[tokens], self._up, *given, *others)[rows - tokens.start]
        step.memo[CHOSEN] = choices
        return out.reshape(len(query), -1)

    def _choose(self, queries: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        """kept [length, index_dim], with pools [length, 2 * index_dim] -> [num_tokens, length] bool"""
        most = self._own.num_chosen
        if self._pool_bias is None:
            return choose_keys(queries, weights, kept, most)
        keys, logits = kept.chunk(2, dim=-1)
        return choose_pools(queries, weights, keys, logits, self._pool_bias, most)

    def _rotated_index(self, queries: Tensor, keys: Tensor, step: SharedInputs) -> tuple[Tensor, Tensor]:
        """queries [num_tokens, heads * index_dim], keys [num_tokens, index_dim] -> [num_tokens, heads, index_dim] and
        [num_tokens, 1, index_dim], of which the first dimensions are rotated. Pairs are put apart in both alike, and
        dimensions that come last before the others."""
        size, split = self._own.index_dim, (self._own.rope_dim, self._own.index_dim - self._own.rope_dim)
        queries, keys = (each.view(len(each), -1, size) for each in (queries, keys))
        if self._own.index_rotates_last:
            queries, keys = (each.roll(self._own.rope_dim, -1) for each in (queries, keys))
        (q, q_rest), (k, k_rest) = (each.split(split, dim=-1) for each in (queries, keys))
        q, k = self._turned(q, k, step, pairs=self._own.index == "pairs")
        return torch.cat([q, q_rest], dim=-1), torch.cat([k, k_rest], dim=-1)


class EagerIndexed(EagerAttend):
    """An `AttendIndexed` with its norms."""

    def __init__(self, weights: EagerWeights, declared: AttendIndexed, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._index_norms = [
            EagerNorm(weights, norm, prefix) for norm in (declared.index_query_norm, declared.index_key_norm)
        ]

    def _heads(self, qkv: Tensor, step: SharedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values: each [num_tokens, its heads, head_dim]"""
        query, key, value = qkv.unflatten(1, (-1, self.head_dim)).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        return *self._turned(*self._normed(query, key), step), value


class EagerBlocks(EagerIndexed):
    """An `AttendBlocks` with its norms."""

    def __init__(self, weights: EagerWeights, declared: AttendBlocks, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._own = declared

    def __call__(self, qkv: Tensor, *values: object) -> Tensor:
        """As `EagerAttend`, with the index's queries and keys before the step's inputs and the cache."""
        *index, step, cache = values
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        query, key, value = self._heads(qkv, step)
        index_query, index_key = (
            norm(each.unflatten(1, (-1, self.head_dim)))[0]
            for norm, each in zip(self._index_norms, index, strict=True)
            if isinstance(each, Tensor)
        )
        index_query, index_key = self._turned(index_query, index_key, step)
        kept = torch.cat([key, index_key], dim=1), functional.pad(value, (0, 0, 0, 1))
        self._write(*kept, cache.keys, cache.values, step.batch, cache.scales)
        own, batch, out = self._own, step.batch, torch.zeros_like(query)
        for seq, length in enumerate(batch.context_lens):
            tokens = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
            if not length:
                continue
            keys, read = gather_heads(query.dtype, cache.keys, cache.values, cache.scales, batch, seq)
            chosen = choose_blocks(index_query[tokens], keys[-1], own.block_size, own.num_blocks, own.local_blocks)
            out[tokens] = attend_blocks(query[tokens], keys[:-1], read[:-1], chosen, own.block_size, own.scale)
        return out.flatten(1)


class EagerPools(EagerIndexed):
    """An `AttendPools` with its norms."""

    def __init__(self, weights: EagerWeights, declared: AttendPools, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        assert declared.rope is not None, "its index rotates keys"
        self._own, self._rope = declared, declared.rope
        self._frequencies = inverse_frequencies(declared.rope).to(weights.device)
        self._rotate_index = weights.kernel("rotary", head_dim=declared.index_dim)

    def __call__(self, qkv: Tensor, *values: object) -> Tensor:
        """As `EagerAttend`, with the index's queries and keys before the step's inputs and the cache."""
        index, step, cache = values
        assert isinstance(index, Tensor)
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        assert self._rope_index is not None
        own, batch = self._own, step.batch
        query, key, value = self._heads(qkv, step)
        heads = index.unflatten(1, (-1, own.index_dim))
        queries, raw = heads[:, :-1].contiguous(), heads[:, -1:]
        queries = self._rotate_index(self._index_norms[0](queries)[0], raw[:, :0], *step.cos_sin[self._rope_index])[0]
        kept_key = torch.cat([key, functional.pad(raw, (0, self.head_dim - own.index_dim))], dim=1)
        kept_value = functional.pad(value, (0, 0, 0, 1))
        self._write(kept_key, kept_value, cache.keys, cache.values, batch, cache.scales)
        out = torch.zeros_like(query)
        for seq, length in enumerate(batch.context_lens):
            tokens = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
            if not length or tokens.stop == tokens.start:
                continue
            keys, read = gather_heads(query.dtype, cache.keys, cache.values, cache.scales, batch, seq)
            pools = self._pool_keys(keys[-1, :, : own.index_dim])
            chosen = choose_means(queries[tokens], pools, length, own.pool_size, own.num_pools)
            out[tokens] = attend_blocks(query[tokens], keys[:-1], read[:-1], chosen[:, None], 1, own.scale)
        return out.flatten(1)

    def _pool_keys(self, raw: Tensor) -> Tensor:
        """raw [length, index_dim] -> [pools, index_dim]"""
        size = self._own.pool_size
        count = len(raw) // size
        if not count:
            return raw[:0]
        means = raw[: count * size].unflatten(0, (count, size)).float().mean(1).to(raw.dtype)
        normed, _ = self._index_norms[1](means)
        positions = torch.arange(count, device=raw.device, dtype=torch.float32) * size
        angles, factor = positions[:, None] * self._frequencies, self._rope.attention_factor
        heads = normed[:, None]
        rotated: Tensor = self._rotate_index(heads, heads[:, :0], angles.cos() * factor, angles.sin() * factor)[0]
        return rotated[:, 0]
