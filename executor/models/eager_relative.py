"""What `blocks.relative_attention` and `blocks.sink_experts` declare, op by op."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.models.blocks.relative_attention import AttendRelative
from headrace.executor.models.blocks.sink_experts import EqualFactors, SinkCorrection
from headrace.executor.models.chunks import log_growth
from headrace.executor.models.eager import EagerAttend, EagerWeights, SharedInputs
from headrace.executor.models.reading import CheckedWeights
from headrace.kernels.reference.relative import RelativeBias
from headrace.kernels.reference.rotary_cache import LayerCache

ABOVE_SIGMOIDS = 2.0


class EagerRelative(EagerAttend):
    """An `AttendRelative` with its norms and profiles."""

    def __init__(self, weights: EagerWeights, declared: AttendRelative, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._growth = declared.growth
        self._profiles = weights.exact_matrix(prefix + declared.profiles, declared.num_profiles, declared.reach)
        self._attend_relative = weights.kernel("relative_attention", head_dim=declared.head_dim)

    def __call__(self, qkv: Tensor, *values: object) -> Tensor:
        """As `EagerAttend`, with the tokens' mixes before the step's inputs and the cache."""
        mixes, step, cache = values
        assert isinstance(mixes, Tensor)
        assert isinstance(step, SharedInputs)
        assert isinstance(cache, LayerCache)
        query, mixes = self.prepared(qkv, step, cache), mixes.unflatten(1, (self.num_heads, -1))
        if self._growth is not None:
            growth = log_growth(step.batch, *self._growth)[:, None, None]
            query, mixes = ((each * growth).to(each.dtype) for each in (query, mixes))
        bias = RelativeBias(mixes, self._profiles)
        attended: Tensor = self._attend_relative(
            query, bias, cache.keys, cache.values, step.batch, self._params, cache.scales
        )
        return attended.flatten(1)


def sink_correction(weights: CheckedWeights, declared: SinkCorrection, prefix: str) -> Tensor:
    """[num_routed + num_sinks] float32"""
    if declared.routed is None:
        routed = torch.zeros(declared.num_routed, device=weights.device)
    else:
        routed = weights.values(declared.routed, prefix)
    always = (routed.max() + ABOVE_SIGMOIDS).expand(declared.num_sinks)
    return torch.cat([routed, always])


def equal_factors(weights: CheckedWeights, declared: EqualFactors, prefix: str) -> Tensor:
    """[count] float32"""
    return weights.vector(prefix + declared.name, 1).expand(declared.count)
