"""What `blocks.shortcut` declares, op by op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.blocks.shortcut import ExpertsAndIdle, Shortcut
from headrace.executor.models.eager import EagerExperts, EagerWeights, SharedInputs

KEPT = "shortcut"
"""Key of `SharedInputs.memo`: what the next layer adds."""


class EagerExpertsAndIdle(EagerExperts):
    """An `ExpertsAndIdle` with its kernels."""

    def __init__(self, weights: EagerWeights, declared: ExpertsAndIdle, prefix: str) -> None:
        super().__init__(weights, declared, prefix)
        self._num_experts = len(declared.gates)
        self._route = weights.kernel("route_experts", num_experts=self._num_experts + declared.num_idle)
        exchange = weights.place.exchange if self.are_divided else None
        self._adds_idle = weights.place.tp_rank == 0 and (exchange is None or exchange.dp_rank == 0)
        """The results of all ranks that share the experts are added up."""

    def _computed(self, x: Tensor, expert_ids: Tensor, shares: Tensor, *others: Any) -> Tensor:
        idle = expert_ids >= self._num_experts
        computed = super()._computed(x, expert_ids.masked_fill(idle, -1), shares, *others)
        if not self._adds_idle:
            return computed
        kept = torch.where(idle, shares, 0.0).sum(-1, keepdim=True)
        return computed + (x * kept).to(computed.dtype)


class EagerShortcut:
    """A `Shortcut`."""

    @classmethod
    def read(cls, weights: EagerWeights, declared: Shortcut, prefix: str) -> EagerShortcut:
        return cls()

    def __call__(self, *values: Any) -> Tensor:
        *given, step, _ = values
        assert isinstance(step, SharedInputs)
        if given:
            step.memo[KEPT] = given[0]
        kept: Tensor = step.memo[KEPT]
        return kept
