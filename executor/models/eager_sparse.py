"""What `blocks.sparse_latent` declares, op by op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace.executor.models.blocks.sparse_latent import AttendChosen
from headrace.executor.models.eager import EagerLatent, EagerWeights, SharedInputs
from headrace.kernels.reference.attention import gather_tokens
from headrace.kernels.reference.latent import without_sequences
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.sparse import attend_chosen, choose_keys

CHOSEN = "chosen keys"
"""Key of `SharedInputs.memo`: the last choice of a layer with an index, by sequence."""


class EagerChosen(EagerLatent):
    """An `AttendChosen` with its kernels."""

    takes_adapters = False

    def __init__(self, weights: EagerWeights, declared: AttendChosen, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._own = declared
        self._index_size = declared.index_dim if declared.index != "none" else 0

    def __call__(self, query: Tensor, latent: Tensor, *values: object) -> Tensor:
        """As `EagerLatent`, with the index's queries, keys and weights before the step's inputs and the cache, if the
        layer has an index."""
        *index, step, cache = values
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        query, vector = self.rotated(query, latent, step)
        if index:
            queries, keys, weights = (each for each in index if isinstance(each, Tensor))
            queries, keys = self._rotated_index(queries, keys, step)
            vector = torch.cat([vector, keys], dim=-1)
        self._write(vector, vector, cache.keys, cache.values, step.batch, cache.scales)
        batch, most = step.batch, self._own.num_chosen
        long = [seq for seq, length in enumerate(batch.context_lens) if length > most]
        dense = without_sequences(batch, long) if long else batch
        padded = functional.pad(query, (0, self._index_size))
        out = torch.empty(0)
        if len(long) < len(batch.context_lens):
            out = self._attend(padded, self._up, cache.keys, dense, self._params, cache.scales)
        else:
            out = query.new_zeros(*query.shape[:2], self._own.value_dim)
        choices: dict[int, Tensor] = {} if index else step.memo[CHOSEN]
        for seq in long:
            tokens = slice(batch.query_starts[seq], batch.query_starts[seq + 1])
            context = gather_tokens(query.dtype, cache.keys, cache.scales, batch, seq)
            width = context.shape[1] - self._index_size
            if index:
                choices[seq] = choose_keys(queries[tokens], weights[tokens], context[:, width:], most)
            out[tokens] = attend_chosen(query[tokens], self._up, context[:, :width], choices[seq], self._params.scale)
        step.memo[CHOSEN] = choices
        return out.reshape(len(query), -1)

    def _rotated_index(self, queries: Tensor, keys: Tensor, step: SharedInputs) -> tuple[Tensor, Tensor]:
        """queries [num_tokens, heads * index_dim], keys [num_tokens, index_dim] -> [num_tokens, heads, index_dim] and
        [num_tokens, 1, index_dim], of which the first dimensions are rotated. Pairs are put apart in both alike."""
        size, split = self._own.index_dim, (self._own.rope_dim, self._own.index_dim - self._own.rope_dim)
        (q, q_rest), (k, k_rest) = (each.view(len(each), -1, size).split(split, dim=-1) for each in (queries, keys))
        q, k = self._turned(q, k, step, pairs=self._own.index == "pairs")
        return torch.cat([q, q_rest], dim=-1), torch.cat([k, k_rest], dim=-1)
