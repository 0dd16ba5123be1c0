"""What `blocks.rwkv` declares, op by op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace.executor.models.blocks.rwkv import Shift, Wkv
from headrace.executor.models.eager import EagerWeights, SharedInputs
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.states import ConvolveParams
from headrace.kernels.reference.wkv import WkvParams

VALUES = "values of the first layer"
"""Key of `SharedInputs.memo`."""
LEAST_SHARE = -math.exp(-0.5)
"""The logarithm of what remains of a state at least."""


class EagerShift:
    """A `Shift`: a convolution of two inputs, of which the older one counts."""

    def __init__(self, weights: EagerWeights, declared: Shift, prefix: str) -> None:
        weight = torch.tensor([[1.0, 0.0]], device=weights.device).expand(declared.channels, 2).contiguous()
        self._params = ConvolveParams(weight, None, None, gated=False)
        self._convolve = weights.kernel("convolve")

    def __call__(self, x: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        result: Tensor = self._convolve(x, self._params, step.states, cache.state)
        return result


class EagerFirstValues:
    """`FirstValues`."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, values: Tensor, *others: Any) -> Tensor:
        *shares, step, _ = others
        assert isinstance(step, SharedInputs)
        if not shares:
            step.memo[VALUES] = values
            return values
        return torch.lerp(values.float(), step.memo[VALUES].float(), shares[0].float().sigmoid()).to(values.dtype)


class EagerWkv:
    """A `Wkv`'s vectors with its kernel."""

    def __init__(self, weights: EagerWeights, declared: Wkv, prefix: str) -> None:
        self._vectors = {key: weights.values(each, prefix) for key, each in declared.vectors().items()}
        self._heads, self._eps = declared.heads // weights.place.tp_size, declared.norm_eps
        self._params = WkvParams(self._heads, declared.head_dim, declared.first_draft_element)
        self._wkv = weights.kernel("wkv")

    def __call__(
        self,
        receptance: Tensor,
        decays: Tensor,
        keys: Tensor,
        values: Tensor,
        rates: Tensor,
        step: SharedInputs,
        cache: LayerCache,
    ) -> Tensor:
        """All [num_tokens, heads * head_dim] -> the same, float32"""
        own, dtype = self._vectors, receptance.dtype
        receptance, decays, keys, values, rates = (t.float() for t in (receptance, decays, keys, values, rates))
        rates = rates.sigmoid()
        removed = functional.normalize(self._by_head(keys * own["removal"]), dim=-1).flatten(1)
        keys = keys * (1 + (rates - 1) * own["growth"])
        shares = torch.exp(LEAST_SHARE * decays.sigmoid())
        known = torch.cat([receptance, shares, keys, values, removed, removed * rates], dim=1)
        mixed = self._wkv(known, self._params, step.states, cache.state)
        normed = functional.group_norm(mixed, self._heads, own["norm_weight"], own["norm_bias"], self._eps)
        added = self._by_head(receptance * keys * own["own"]).sum(-1, keepdim=True) * self._by_head(values)
        return (normed + added.flatten(1)).to(dtype)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self._heads, -1))
