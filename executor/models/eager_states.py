"""Layers that keep a state per sequence, and gates, op by op: what `blocks.short_convolution`, `blocks.recurrent`,
`blocks.linear_attention` and `blocks.gated_norm` declare, with weights and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.blocks import Axis, size_of
from headrace.executor.models.blocks.gated_lru import Lru
from headrace.executor.models.blocks.gated_norm import (
    Added,
    GatedNorm,
    HeadNorms,
    JoinedColumns,
    OutputGate,
    SoftCap,
    SparseGate,
)
from headrace.executor.models.blocks.linear_attention import LinearAttention, PreparedHeads
from headrace.executor.models.blocks.recurrent import Scan
from headrace.executor.models.blocks.selective import SelectiveScan
from headrace.executor.models.blocks.shared_transformer import Halves
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.models.eager import EagerNorm, EagerWeights, SharedInputs
from headrace.executor.models.reading import CheckedWeights, own_part
from headrace.kernels.reference.gated_lru import GatedLruParams
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.selective import SelectiveParams
from headrace.kernels.reference.states import GATES, ConvolveParams, ScanParams


def convolve_params(weights: CheckedWeights, declared: Convolve, prefix: str) -> ConvolveParams:
    weight, bias = weights.filters(declared, prefix)
    if declared.residual:
        weight[:, -1] += 1
    if declared.distance > 1:
        taps, weight = weight, weight.new_zeros(len(weight), (declared.width - 1) * declared.distance + 1)
        weight[:, :: declared.distance] = taps
    places = declared.history, declared.first_draft_element
    return ConvolveParams(weight, bias, declared.activation, declared.gated, *places)


def scan_params(weights: CheckedWeights, declared: Scan, prefix: str) -> ScanParams:
    size = weights.place.tp_size
    vectors = (declared.decay, declared.skip, declared.step_bias)
    decay, skip, step_bias = (weights.values(each, prefix) for each in vectors)
    heads, groups = declared.num_heads // size, max(1, declared.num_groups // size)
    return ScanParams(
        decay=-decay.exp(),
        skip=skip,
        step_bias=step_bias,
        step_limits=declared.step_limits,
        num_heads=heads,
        head_dim=declared.head_dim,
        state_size=declared.state_size,
        num_groups=groups,
        first_draft_element=heads * declared.head_dim + 2 * groups * declared.state_size,
    )


def linear_attention_params(weights: CheckedWeights, declared: LinearAttention, prefix: str) -> LinearAttentionParams:
    size, place = weights.place.tp_size, weights.place
    heads, all_keys = declared.num_heads // size, declared.num_key_heads
    key_heads = all_keys if declared.tiled else max(1, all_keys // size)
    of_head = torch.arange(heads, device=weights.device)
    if declared.tiled:
        of_head = (of_head + place.tp_rank * heads) % all_keys
    else:
        of_head = of_head // (heads // key_heads)
    bias = None if declared.decay_bias is None else weights.values(declared.decay_bias, prefix)
    if declared.decay is None:
        own = Axis(declared.num_heads).own(place)
        decay = torch.tensor(declared.rates if own is None else declared.rates[own], device=weights.device)
    else:
        decay = weights.values(declared.decay, prefix).exp()
    convolved = 2 * key_heads * declared.key_dim + heads * declared.value_dim
    return LinearAttentionParams(
        num_heads=heads,
        num_key_heads=key_heads,
        key_of_head=of_head,
        key_dim=declared.key_dim,
        value_dim=declared.value_dim,
        decay=-decay,
        decay_bias=bias,
        correction=declared.correction,
        unit_keys=declared.unit_keys,
        scale=declared.scale,
        decay_floor=declared.decay_floor,
        first_draft_element=declared.first_draft_element + (convolved if declared.convolved else 0),
    )


def selective_params(weights: CheckedWeights, declared: SelectiveScan, prefix: str) -> SelectiveParams:
    channels, size = declared.channels, declared.state_size
    own = own_part(channels, weights.place)
    decay = weights.exact_matrix(f"{prefix}{declared.decay}", channels.size, size, own)
    return SelectiveParams(-decay.exp().T.contiguous(), weights.values(declared.skip, prefix))


def gated_lru_params(weights: CheckedWeights, declared: Lru, prefix: str) -> GatedLruParams:
    values, dim = {key: weights.values(each, prefix) for key, each in declared.vectors().items()}, declared.head_dim
    matrices = {f"{key}_weight": values[f"{key}_weight"].view(-1, dim, dim) for key in ("input", "recurrence")}
    biases = {f"{key}_bias": values[f"{key}_bias"].view(-1, 1, dim) for key in ("input", "recurrence")}
    return GatedLruParams(decay=values["decay"], **matrices, **biases)


def gated_norm_weight(weights: CheckedWeights, declared: GatedNorm, prefix: str) -> Tensor:
    own = own_part(declared.weight_size, weights.place)
    found = weights.vector(f"{prefix}{declared.name}.weight", size_of(declared.weight_size), take=own)
    return found * declared.scale


@dataclass(frozen=True)
class EagerOutputGate:
    """An `OutputGate` with its kernel."""

    declared: OutputGate
    kernel: Callable[..., Tensor]

    @classmethod
    def read(cls, weights: EagerWeights, declared: OutputGate, prefix: str) -> EagerOutputGate:
        return cls(declared, weights.kernel("gated_norm"))

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.kernel(x, gate, None, self.declared.group, 0.0, self.declared.activation)


class EagerAdded:
    """`Added`."""

    def __init__(self, weights: EagerWeights, declared: Added, prefix: str) -> None:
        self._scale = declared.scale

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, alpha=self._scale)


class EagerSoftCap:
    """`SoftCap`."""

    def __init__(self, weights: EagerWeights, declared: SoftCap, prefix: str) -> None:
        self._cap = declared.cap

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float() / self._cap) * self._cap


class EagerJoinedColumns:
    """`JoinedColumns`."""

    def __init__(self, weights: EagerWeights, declared: JoinedColumns, prefix: str) -> None:
        pass

    def __call__(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=-1)


class EagerSparseGate:
    """`SparseGate`."""

    def __init__(self, weights: EagerWeights, declared: SparseGate, prefix: str) -> None:
        self._declared = declared

    def __call__(self, gate: Tensor, whole: Tensor, up: Tensor) -> Tensor:
        declared = self._declared
        counted = whole[:, : declared.num_counted].float()
        lowest = counted.mean(-1, keepdim=True) + declared.cutoff * counted.std(-1, keepdim=True, correction=0)
        above = (gate.float() - lowest).relu().to(gate.dtype)
        return GATES[declared.activation](above) * up


class EagerSum:
    """A `Sum`."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Tensor, *parts: Tensor) -> Tensor:
        if not parts:
            return x.clone()
        added = torch.cat(parts, dim=-1)
        return x[:, : added.shape[-1]] + added


@dataclass(frozen=True)
class EagerHalves:
    """`Halves` with their kernel."""

    kernel: Callable[..., Tensor]
    activation: str

    @classmethod
    def read(cls, weights: EagerWeights, declared: Halves, prefix: str) -> EagerHalves:
        return cls(weights.kernel("activate_and_multiply", kind=declared.activation), declared.activation)

    def __call__(self, both: Tensor) -> Tensor:
        return self.kernel(both, self.activation)


class EagerGatedNorm:
    """A `GatedNorm`'s weight with its kernel."""

    def __init__(self, weights: EagerWeights, declared: GatedNorm, prefix: str) -> None:
        self._weight = gated_norm_weight(weights, declared, prefix)
        own = own_part(declared.size, weights.place)
        self.columns = declared.size.size if own is None else own.stop - own.start
        """Columns of this rank."""
        self._declared, self._place = declared, weights.place
        self._norm = weights.kernel("gated_norm")

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        declared = self._declared
        if x.shape[1] < declared.group:  # a part of the only group
            wide = x.float()
            mean = self._place.all_reduce(wide.square().sum(-1, keepdim=True)) / declared.group
            x = (wide * torch.rsqrt(mean + declared.eps) * self._weight).to(x.dtype)
            return x if gate is None else self._norm(x, gate, None, 1, 0.0, declared.activation)
        normed: Tensor = self._norm(x, gate, self._weight, declared.group, declared.eps, declared.activation)
        return normed


def head_norm_weights(weights: CheckedWeights, declared: HeadNorms, prefix: str) -> Tensor:
    """Of the heads of this rank, [heads * head_dim] float32."""
    own, name = own_part(declared.heads, weights.place), f"{prefix}{declared.name}.weight"
    return weights.exact_matrix(name, declared.heads.size, declared.head_dim, own).flatten()


class EagerHeadNorms:
    """`HeadNorms` with their kernel."""

    def __init__(self, weights: EagerWeights, declared: HeadNorms, prefix: str) -> None:
        self._weight, self._declared = head_norm_weights(weights, declared, prefix), declared
        self._norm = weights.kernel("gated_norm")

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x, None, self._weight, self._declared.head_dim, self._declared.eps, "none")
        return normed


class EagerConvolve:
    """A `Convolve`'s weights with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Convolve, prefix: str) -> None:
        self._params = convolve_params(weights, declared, prefix)
        self._convolve = weights.kernel("convolve")

    def __call__(self, x: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        result: Tensor = self._convolve(x, self._params, step.states, cache.state)
        return result


class EagerScan:
    """A `Scan`'s vectors with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Scan, prefix: str) -> None:
        self._params = scan_params(weights, declared, prefix)
        self._scan = weights.kernel("scan")

    def __call__(self, mixed: Tensor, steps: Tensor, gate: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        result: Tensor = self._scan(mixed, steps, gate, self._params, step.states, cache.state)
        return result


class EagerPreparedHeads:
    """`PreparedHeads` with their norms and rotation."""

    def __init__(self, weights: EagerWeights, declared: PreparedHeads, prefix: str) -> None:
        self._num_heads = declared.num_heads // weights.place.tp_size
        self._norms = [
            None if norm is None else EagerNorm(weights, norm, prefix)
            for norm in (declared.query_norm, declared.key_norm)
        ]
        self._rope_index = None if declared.rope is None else weights.ropes.index(declared.rope)
        self._rotate = weights.kernel("rotary", head_dim=declared.head_dim)

    def __call__(self, mixed: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        parts = mixed.unflatten(1, (3, self._num_heads, -1)).unbind(1)
        query, key = (
            part if norm is None else norm(part)[0] for part, norm in zip(parts[:2], self._norms, strict=True)
        )
        if self._rope_index is not None:
            query, key = self._rotate(query, key, *step.cos_sin[self._rope_index])
        return torch.stack([query, key, parts[2]], dim=1).flatten(1)


class EagerLinearAttention:
    """A `LinearAttention`'s vectors with its kernel."""

    def __init__(self, weights: EagerWeights, declared: LinearAttention, prefix: str) -> None:
        self._params = linear_attention_params(weights, declared, prefix)
        self._attend = weights.kernel("linear_attention")

    def __call__(self, mixed: Tensor, *values: Any) -> Tensor:
        """values: decays and rates unless there are none, the step's inputs and what the layer keeps"""
        *given, step, cache = values
        decays, rates = given or (None, None)
        result: Tensor = self._attend(mixed, decays, rates, self._params, step.states, cache.state)
        return result


class EagerSelectiveScan:
    """A `SelectiveScan`'s decays with its kernel."""

    def __init__(self, weights: EagerWeights, declared: SelectiveScan, prefix: str) -> None:
        self._params = selective_params(weights, declared, prefix)
        self._scan = weights.kernel("selective_scan")

    def __call__(
        self, x: Tensor, steps: Tensor, shared: Tensor, gate: Tensor, step: SharedInputs, cache: LayerCache
    ) -> Tensor:
        result: Tensor = self._scan(x, steps, shared, gate, self._params, step.states, cache.state)
        return result


class EagerLru:
    """An `Lru`'s gates with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Lru, prefix: str) -> None:
        self._params = gated_lru_params(weights, declared, prefix)
        self._recur = weights.kernel("gated_lru")

    def __call__(self, x: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        result: Tensor = self._recur(x, self._params, step.states, cache.state)
        return result
