"""What `blocks.early_experts` declares, op by op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.executor.models.blocks import Declared
from headrace.executor.models.eager import EagerWeights, SharedInputs

KEPT = "layer's input"
"""Key of `SharedInputs.memo`."""


class EagerKeptInput:
    """A `KeptInput`."""

    def __init__(self, weights: EagerWeights, declared: Declared, prefix: str) -> None:
        pass

    def __call__(self, x: Tensor, step: SharedInputs, _: Any) -> Tensor:
        step.memo[KEPT] = x
        return x


class EagerTakenInput:
    """A `TakenInput`."""

    def __init__(self, weights: EagerWeights, declared: Declared, prefix: str) -> None:
        pass

    def __call__(self, x: Tensor, step: SharedInputs, _: Any) -> Tensor:
        kept: Tensor = step.memo[KEPT]
        return kept
