"""What `blocks.value_experts` declares, op by op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.executor.models.blocks.value_experts import NormedHeads, ValueExperts
from headrace.executor.models.eager import EagerWeights
from headrace.executor.models.eager_states import EagerGatedNorm
from headrace.executor.models.reading import Part, own_part


class EagerValueExperts:
    """A `ValueExperts` with its weights."""

    def __init__(self, weights: EagerWeights, declared: ValueExperts, prefix: str) -> None:
        rows, own = declared.rows.size, own_part(declared.rows, weights.place)
        parts = [(f"{name}.weight", Part(name, rows, own)) for name in (prefix + each for each in declared.matrices)]
        self._matrices = [weights.stack([part], declared.hidden, None) for part in parts]
        weights.nbytes += sum(each.nbytes for each in self._matrices)
        self._routing = declared.routing
        self._route = weights.kernel("route_experts", num_experts=len(declared.matrices))

    def __call__(self, x: Tensor, logits: Tensor, correction: Tensor | None) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, rows of this rank]"""
        routing = self._routing
        chosen, shares = self._route(logits, top_k=routing.num_chosen, bias=correction, **routing.options)
        parts = torch.zeros(*chosen.shape, len(self._matrices[0]), dtype=torch.float32)
        for index in chosen.unique().tolist():
            tokens, slots = (chosen == index).nonzero(as_tuple=True)
            parts[tokens, slots] = F.silu(F.linear(x[tokens], self._matrices[index])).float()
        total: Tensor = (parts * shares[..., None]).sum(1)
        return total.to(x.dtype)


class EagerNormedHeads:
    """`NormedHeads` with their weights."""

    def __init__(self, weights: EagerWeights, declared: NormedHeads, prefix: str) -> None:
        self._query, self._key = (EagerGatedNorm(weights, each, prefix) for each in (declared.query, declared.key))

    def __call__(self, heads: Tensor) -> Tensor:
        """heads: queries, keys and perhaps values side by side -> the same"""
        queries, keys = self._query.columns, self._key.columns
        rest = heads[:, queries + keys :]
        query, key = (each.contiguous() for each in heads[:, : queries + keys].split((queries, keys), dim=1))
        return torch.cat([self._query(query), self._key(key), rest], dim=1)
