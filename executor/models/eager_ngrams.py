"""What `blocks.ngrams` and `blocks.ngram_features` declare, op by op."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.models.blocks.ngram_features import NGramRows
from headrace.executor.models.blocks.ngrams import NGrams
from headrace.executor.models.eager import EagerWeights, SharedInputs
from headrace.kernels.reference.rotary_cache import LayerCache


class EagerNGrams:
    """An `NGrams` with its tables, whose rows the ranks divide, and projections, which each has whole."""

    def __init__(self, weights: EagerWeights, declared: NGrams, prefix: str) -> None:
        self._declared, self._place, at = declared, weights.place, prefix + declared.at
        self._own = [self._place.vocabulary(rows) for rows in declared.rows]
        taken = self._own if self._place.tp_size > 1 else [None] * len(self._own)
        self._tables = [
            weights.matrix(f"{at}.embedders.{index}.weight", rows, declared.width, own)
            for index, (rows, own) in enumerate(zip(declared.rows, taken, strict=True))
        ]
        self._projections = [
            weights.matrix(f"{at}.post_projs.{index}.weight", declared.hidden, declared.width)
            for index in range(len(declared.rows))
        ]

    def __call__(self, token_ids: Tensor, earlier_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [num_tokens] int64, earlier_ids [num_tokens, reach] int64: of the tokens before each, the nearest
        first, below 0 before the sequence; embedded [num_tokens, hidden] -> [num_tokens, hidden]"""
        counted = ((earlier_ids >= 0) & (earlier_ids != self._declared.end_id)).cumprod(1)
        context, total = earlier_ids * counted, torch.zeros_like(embedded, dtype=torch.float32)
        parts = zip(self._tables, self._projections, self._own, self._declared.rows, strict=True)
        for index, (table, projection, own, rows) in enumerate(parts):
            places = self._places(token_ids, context, index // self._declared.splits + 1, rows) - own.start
            mine = (places >= 0) & (places < len(table))
            found = table[places * mine].masked_fill(~mine[:, None], 0)
            total += found @ projection.T
        count = len(self._tables) + 1
        return ((embedded + self._place.all_reduce(total)) / count).to(embedded.dtype)

    def _places(self, token_ids: Tensor, context: Tensor, reach: int, rows: int) -> Tensor:
        """The row of each token's n-gram with `reach` tokens before it, [num_tokens] int64."""
        found = token_ids
        for back in range(1, reach + 1):
            found = found + context[:, back - 1] * pow(self._declared.vocab_size, back, rows)
        return found % rows


class EagerNGramRows:
    """An `NGramRows` with its table, whose rows the ranks divide."""

    def __init__(self, weights: EagerWeights, declared: NGramRows, prefix: str) -> None:
        self._declared, self._place, at = declared, weights.place, prefix + declared.at
        firsts = [sum(declared.rows[:index]) for index in range(len(declared.rows))]
        for name, values in (
            ("layer_multipliers", declared.multipliers),
            ("ngram_heads_vocab_sizes", declared.rows),
            ("ngram_heads_offsets", firsts),
        ):
            weights.expect_integers(f"{at}.{name}", values)
        self._rows, self._firsts = (
            torch.tensor(each, device=weights.device).unflatten(0, (-1, declared.hashes))
            for each in (declared.rows, firsts)
        )
        self._own = self._place.vocabulary(declared.stored_rows)
        taken = self._own if self._place.tp_size > 1 else None
        self._table = weights.matrix(f"{at}.ngram_embedding.weight", declared.stored_rows, declared.width, taken)

    def __call__(self, step: SharedInputs, cache: LayerCache) -> Tensor:
        assert step.token_ids is not None
        assert step.earlier_ids is not None, "the rank's batch has them"
        places = self._places(step.token_ids, step.earlier_ids) - self._own.start
        mine = (places >= 0) & (places < len(self._table))
        found = self._table[places * mine].masked_fill(~mine[..., None], 0)
        return self._place.all_reduce(found.flatten(1))

    def _places(self, token_ids: Tensor, earlier_ids: Tensor) -> Tensor:
        """[num_tokens] and [num_tokens, reach or more] int64 -> rows of the table, [num_tokens, number of hashes]"""
        declared = self._declared
        earlier_ids = earlier_ids[:, : declared.reach]
        counted = ((earlier_ids >= 0) & (earlier_ids != declared.end_id)).cumprod(1).bool()
        earlier = torch.where(counted, earlier_ids, declared.end_id)
        mixed, parts = token_ids * declared.multipliers[0], []
        for back, multiplier in enumerate(declared.multipliers[1:]):
            mixed = mixed ^ (earlier[:, back] * multiplier)
            parts.append(mixed[:, None] % self._rows[back] + self._firsts[back])
        return torch.cat(parts, dim=1)
