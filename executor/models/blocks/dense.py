"""The dense FFN: up projection, activation, down projection; gated (Shazeer 2020) or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Axis, Declared, Ffn, Held, Linear, Ops, rounded_up

NamedActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""Those that configs name."""
Activation = NamedActivation | Literal["silu_to_7", "silu_to_16", "silu_below_10"]


@dataclass(frozen=True)
class Dense(Ffn):
    inner: int
    activation: Activation | Literal["clamped_silu"]
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    """Whether the down projection has a bias; None: as `bias`."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, inner = spec.names, Axis(self.inner)
        matrices = ((names.gate, inner), (names.up, inner)) if self.gated else ((names.up, inner),)
        up = Linear(matrices, spec.hidden_size, self.bias, activation=self.activation, gated=self.gated)
        down_bias = self.bias if self.down_bias is None else self.down_bias
        return {"up": up, "down": Linear(((names.down, spec.hidden_size),), inner, down_bias)}

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        return [ops.product(held["down"], ops.linear(held["up"], x))]

    def for_ranks(self, tp_size: int, inner_block: int) -> Dense:
        return self if tp_size == 1 else replace(self, inner=rounded_up(self.inner, tp_size * inner_block))

    def values_per_token(self, tp_size: int) -> int:
        """Gate, up projection, and their product."""
        return 3 * self.inner // tp_size

    def problem(self) -> str:
        return "" if self.inner >= 1 else f"intermediate_size must be at least 1, got {self.inner}"
