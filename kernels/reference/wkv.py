"""RWKV-7's recurrence (Peng et al. 2025, section 4), in torch, token by token: a generalised delta rule, whose states
lose what one key reads and gain it at another, scaled.

Sequences, states and drafts are as in `kernels.reference.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.reference.states import LayerState, StateBatch

NUM_INPUTS = 6


@dataclass(frozen=True, eq=False)
class WkvParams:
    num_heads: int
    """Of this rank."""
    head_dim: int
    first_draft_element: int
    """Where in a draft's kept input those of this op begin."""


def wkv(known: Tensor, params: WkvParams, batch: StateBatch, state: LayerState) -> Tensor:
    """For each head, with all vectors as columns and S [values, keys]:

        S = S diag(shares) - (S removed) replaced^T + value key^T,    y = S receptance

    known [num_tokens, 6 * heads * head_dim] float32: receptance, shares, key, value, removed and replaced. Returns
    [num_tokens, heads * head_dim] float32."""
    result = torch.empty(len(known), known.shape[1] // NUM_INPUTS, device=known.device)
    units, first = state.kept["state"], params.first_draft_element
    for each in batch.sequences:
        own = known[each.span]
        drafted = state.drafted[each.row, :, first : first + known.shape[1]]
        inputs = torch.cat([drafted[: each.replayed], own])
        heads = inputs.view(len(inputs), NUM_INPUTS, params.num_heads, params.head_dim)
        held, stores, outputs = units.read(each.source), each.stores, []
        while stores and stores[0][0] == 0:
            units.write(stores.pop(0)[1], held)
        for token in range(len(inputs)):
            r, w, k, v, a, b = heads[token]
            read = (held * a[:, None]).sum(-1)
            held = held * w[:, None] - read[..., None] * b[:, None] + v[..., None] * k[:, None]
            while stores and stores[0][0] == token + 1:
                units.write(stores.pop(0)[1], held)
            if token >= each.replayed:
                outputs.append((held * r[:, None]).sum(-1))
        result[each.span] = torch.stack(outputs).flatten(1)
        drafts = own[each.committed :]
        drafted[: len(drafts)] = drafts
    return result


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"wkv": wkv})
