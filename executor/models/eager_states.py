"""Layers that keep a state per sequence, op by op: what `blocks.short_convolution` and `blocks.recurrent` declare, with
its weights and kernels."""

from __future__ import annotations

from torch import Tensor

from headrace.executor.models.blocks.recurrent import GroupNorm, Scan
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.models.eager import EagerWeights, SharedInputs
from headrace.executor.models.reading import CheckedWeights
from headrace.kernels.reference.states import ConvolveParams, LayerState, ScanParams


def convolve_params(weights: CheckedWeights, declared: Convolve, prefix: str) -> ConvolveParams:
    weight, bias = weights.filters(declared, prefix)
    return ConvolveParams(weight, bias, declared.activation, declared.gated)


def scan_params(weights: CheckedWeights, declared: Scan, prefix: str) -> ScanParams:
    size = weights.place.tp_size
    vectors = (declared.decay, declared.skip, declared.step_bias)
    decay, skip, step_bias = (weights.values(each, prefix) for each in vectors)
    return ScanParams(
        decay=-decay.exp(),
        skip=skip,
        step_bias=step_bias,
        step_limits=declared.step_limits,
        num_heads=declared.num_heads // size,
        head_dim=declared.head_dim,
        state_size=declared.state_size,
        num_groups=declared.num_groups // size,
        first_draft_element=declared.convolved // size,
    )


class EagerGroupNorm:
    """A `GroupNorm`'s weight with its kernel."""

    def __init__(self, weights: EagerWeights, declared: GroupNorm, prefix: str) -> None:
        name = f"{prefix}{declared.name}.weight"
        self._weight = weights.vector(name, declared.size.size, take=declared.size.own(weights.place))
        self._declared, self._norm = declared, weights.kernel("group_norm")

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x, self._weight, self._declared.group, self._declared.eps)
        return normed


class EagerConvolve:
    """A `Convolve`'s weights with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Convolve, prefix: str) -> None:
        self._params = convolve_params(weights, declared, prefix)
        self._convolve = weights.kernel("convolve")

    def __call__(self, x: Tensor, step: SharedInputs, state: LayerState) -> Tensor:
        result: Tensor = self._convolve(x, self._params, step.batch, state)
        return result


class EagerScan:
    """A `Scan`'s vectors with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Scan, prefix: str) -> None:
        self._params = scan_params(weights, declared, prefix)
        self._scan = weights.kernel("scan")

    def __call__(self, mixed: Tensor, steps: Tensor, gate: Tensor, step: SharedInputs, state: LayerState) -> Tensor:
        result: Tensor = self._scan(mixed, steps, gate, self._params, step.batch, state)
        return result
