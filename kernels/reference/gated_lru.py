"""Real-gated linear recurrent units (Griffin: De et al. 2024, section 2.4), in torch, token by token. Sequences, states
and drafts are as in `kernels.reference.states`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels.reference.states import LayerState, StateBatch

SHARPNESS = 8.0
"""The power of a channel's decay at a recurrence gate of 1."""


@dataclass(frozen=True, eq=False)
class GatedLruParams:
    decay: Tensor
    """[channels] float32, before softplus"""
    input_weight: Tensor
    """[heads, head_dim, head_dim] float32: the input gates are each head's channels times its matrix"""
    input_bias: Tensor
    """[heads, 1, head_dim] float32"""
    recurrence_weight: Tensor
    """[heads, head_dim, head_dim] float32"""
    recurrence_bias: Tensor
    """[heads, 1, head_dim] float32"""

    @property
    def rates(self) -> Tensor:
        """[channels] float32: the logarithm of what remains of a channel at a recurrence gate of 1"""
        return -SHARPNESS * functional.softplus(self.decay)


def gated_lru(x: Tensor, params: GatedLruParams, batch: StateBatch, state: LayerState) -> Tensor:
    """For each channel, with its gates i and r and a = exp(-8 r softplus(decay)):

        h = a * h + sqrt(1 - a^2) * i * x,    y = h

    and h = i * x for a sequence's first token. x [num_tokens, channels], after the convolution, whose part of a draft's
    kept input comes first. Returns [num_tokens, channels] in x's dtype; all is in float32."""
    channels = x.shape[1]
    result, units = torch.empty(len(x), channels, device=x.device), state.kept["state"]
    for each in batch.sequences:
        own = x[each.span].float()
        drafted = state.drafted[each.row, :, channels:]
        inputs = torch.cat([drafted[: each.replayed], own])
        decays, added = _gated(inputs, params)
        if each.source is None:  # the first token of all: nothing has decayed
            added[0] = inputs[0] * _gate(inputs[:1], params.input_weight, params.input_bias)[0]
        held, stores, outputs = units.read(each.source).flatten(), each.stores, []
        for token in range(len(inputs)):
            held = decays[token] * held + added[token]
            while stores and stores[0][0] == token + 1:
                units.write(stores.pop(0)[1], held)
            if token >= each.replayed:
                outputs.append(held)
        result[each.span] = torch.stack(outputs)
        drafts = own[each.committed :]
        drafted[: len(drafts)] = drafts
    return result.to(x.dtype)


def _gated(inputs: Tensor, params: GatedLruParams) -> tuple[Tensor, Tensor]:
    """[num_tokens, channels] each: the decays and what is added to the state."""
    gated = inputs * _gate(inputs, params.input_weight, params.input_bias)
    recurrence = _gate(inputs, params.recurrence_weight, params.recurrence_bias)
    logarithm = recurrence * params.rates
    return logarithm.exp(), gated * (1 - (2 * logarithm).exp()).sqrt()


def _gate(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The products of each token by itself, so that no result depends on the other tokens."""
    heads, size, _ = weight.shape
    rows = inputs.view(len(inputs), heads, 1, size)
    products = torch.stack([torch.baddbmm(bias, row, weight) for row in rows])
    return products.flatten(1).sigmoid()


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"gated_lru": gated_lru})
