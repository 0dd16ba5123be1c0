"""Selective scans (Mamba: Gu and Dao 2023), in torch, token by token. Sequences, states and drafts are as in
`kernels.reference.states`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.reference.states import LayerState, StateBatch


@dataclass(frozen=True, eq=False)
class SelectiveParams:
    decay: Tensor
    """[state_size, channels] float32: rates of decay, negative"""
    skip: Tensor
    """[channels] float32"""

    @property
    def sizes(self) -> tuple[int, int]:
        """(state_size, channels)"""
        return self.decay.shape[0], self.decay.shape[1]


def selective_scan(
    x: Tensor,
    steps: Tensor,
    shared: Tensor,
    gate: Tensor,
    params: SelectiveParams,
    batch: StateBatch,
    state: LayerState,
) -> Tensor:
    """For each channel, with dt = softplus(steps):

        h = exp(dt * decay) * h + dt * x * B,    y = h C + skip * x,    result y * silu(gate)

    x, steps, gate [num_tokens, channels]; shared [num_tokens, 2 * state_size]: B, then C. Returns [num_tokens,
    channels] in x's dtype; all is in float32. A draft's kept input has x, steps and shared after the convolution's."""
    size, channels = params.sizes
    known = torch.cat([each.float() for each in (x, steps, shared)], dim=1)
    result = torch.empty(len(x), channels, device=x.device)
    units = state.kept["state"]
    for each in batch.sequences:
        own = known[each.span]
        drafted = state.drafted[each.row, :, channels:]
        inputs = torch.cat([drafted[: each.replayed], own])
        values, raw, before, after = inputs.split((channels, channels, size, size), dim=1)
        dt = F.softplus(raw)
        held, stores, outputs = units.read(each.source), each.stores, []
        for token in range(len(inputs)):
            added = dt[token] * values[token]
            held = torch.exp(dt[token] * params.decay) * held + added * before[token][:, None]
            while stores and stores[0][0] == token + 1:
                units.write(stores.pop(0)[1], held)
            if token >= each.replayed:
                outputs.append((held * after[token][:, None]).sum(0) + params.skip * values[token])
        result[each.span] = torch.stack(outputs)
        drafts = own[each.committed :]
        drafted[: len(drafts), : known.shape[1]] = drafts
    return (result * F.silu(gate.float())).to(x.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"selective_scan": selective_scan})
