"""Linear attention with states that decay, in torch, token by token: gated delta rule (Yang et al. 2025), its form with
a decay for each channel of a key (Kimi Delta Attention, Kimi Team 2025), and lightning attention (Qin et al. 2024).

Sequences, states and drafts are as in `kernels.reference.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.reference.states import LayerState, StateBatch

UNIT_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by its length."""


@dataclass(frozen=True, eq=False)
class LinearAttentionParams:
    num_heads: int
    """Heads of values of this rank."""
    num_key_heads: int
    """Heads of queries and keys of this rank."""
    key_of_head: Tensor
    """[num_heads] int64: the head of queries and keys that each head of values uses"""
    key_dim: int
    value_dim: int
    decay: Tensor
    """[num_heads] float32: a head's rate of decay, negative"""
    decay_bias: Tensor | None
    """[columns of the decays] float32, added to them; None: a head's decay is the same for all tokens"""
    correction: float
    """The most that a value is corrected by what its key reads from the state (the delta rule); 0: not at all"""
    unit_keys: bool
    """Whether queries and keys are divided by their lengths."""
    scale: float
    """Multiplies queries."""
    decay_floor: float
    """The least logarithm of a decay; 0: there is none"""
    first_draft_element: int
    """Where in a draft's kept input those of this op begin, after the convolution's."""

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        return (self.num_key_heads * self.key_dim,) * 2 + (self.num_heads * self.value_dim,)


def linear_attention(
    mixed: Tensor,
    decays: Tensor | None,
    rates: Tensor | None,
    params: LinearAttentionParams,
    batch: StateBatch,
    state: LayerState,
) -> Tensor:
    """For each head, with keys and queries as columns:

        S = d * S,    S = S + key outer (rate * (value - S^T key)),    y = S^T query

    where d = exp(decay * softplus(decays + bias)), for a head or for each channel of its keys, and rate = correction *
    sigmoid(rates). Without a correction S = S + key outer value. With a floor d = exp(floor * sigmoid(-decay * (decays
    + bias))).

    mixed [num_tokens, columns of queries, keys and values]; decays [num_tokens, heads or heads * key_dim] or None;
    rates [num_tokens, heads] or None. Returns [num_tokens, heads * value_dim] in mixed's dtype; all is in float32."""
    inputs_of = [each.float() for each in (mixed, decays, rates) if each is not None]
    known, sizes = torch.cat(inputs_of, dim=1), [each.shape[1] for each in inputs_of]
    result = torch.empty(len(mixed), params.num_heads * params.value_dim, device=mixed.device)
    units, first = state.kept["state"], params.first_draft_element
    for each in batch.sequences:
        own = known[each.span]
        drafted = state.drafted[each.row, :, first:]
        inputs = torch.cat([drafted[: each.replayed], own])
        parts = dict(zip([n for n, t in (("decays", decays), ("rates", rates)) if t is not None],
                         inputs.split(sizes, dim=1)[1:], strict=True))  # fmt: skip
        query, key, value = _heads(inputs[:, : sizes[0]], params)
        shares = _shares(parts.get("decays"), params, len(inputs))
        rate = params.correction * parts["rates"].sigmoid() if "rates" in parts else None
        held, stores, outputs = units.read(each.source), each.stores, []
        for token in range(len(inputs)):
            held = shares[token] * held
            added = value[token]
            if rate is not None:
                read = (held * key[token][..., None]).sum(1)
                added = rate[token][:, None] * (added - read)
            held = held + key[token][..., None] * added[:, None]
            while stores and stores[0][0] == token + 1:
                units.write(stores.pop(0)[1], held)
            if token >= each.replayed:
                outputs.append((held * query[token][..., None]).sum(1))
        result[each.span] = torch.stack(outputs).flatten(1)
        drafts = own[each.committed :]
        drafted[: len(drafts), : known.shape[1]] = drafts
    return result.to(mixed.dtype)


def _heads(mixed: Tensor, params: LinearAttentionParams) -> tuple[Tensor, Tensor, Tensor]:
    """-> queries and keys [num_tokens, heads, key_dim], values [num_tokens, heads, value_dim]"""
    query, key, value = mixed.split(params.parts, dim=1)
    both = []
    for each in (query, key):
        heads = each.unflatten(1, (params.num_key_heads, params.key_dim))
        if params.unit_keys:
            heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_EPS)
        both.append(heads[:, params.key_of_head])
    return both[0] * params.scale, both[1], value.unflatten(1, (params.num_heads, params.value_dim))


def _shares(decays: Tensor | None, params: LinearAttentionParams, num_tokens: int) -> Tensor:
    """What remains of the state: [num_tokens, heads, key_dim or 1, 1]"""
    if params.decay_bias is None or decays is None:
        return params.decay.exp()[None, :, None, None].expand(num_tokens, -1, -1, -1)
    steps, rate = (decays + params.decay_bias).unflatten(1, (params.num_heads, -1)), params.decay[:, None]
    logarithm = params.decay_floor * (-rate * steps).sigmoid() if params.decay_floor else rate * F.softplus(steps)
    return torch.exp(logarithm)[..., None]


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"linear_attention": linear_attention})
