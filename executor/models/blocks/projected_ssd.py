"""PLaMo 2's recurrent mixer: Mamba 2's recurrence, whose B, C and time steps are projected from each head's convolved
input, as Mamba's are (Preferred Networks 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, Kept
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, Norm
from headrace.executor.models.blocks.gated_norm import JoinedColumns
from headrace.executor.models.blocks.recurrent import Ssd
from headrace.executor.models.blocks.short_convolution import Convolve


@dataclass(frozen=True, kw_only=True)
class ProjectedSsd(Ssd):
    """All heads share B and C."""

    rank: int
    """Inner size of the projection to time steps."""
    groups: int = 1
    normed: bool = False

    def fused(self) -> tuple[Fused, ...]:
        """How checkpoints store the projections: of each head its gate's rows, then its input's."""
        of_head = ((f"{self.at}.in_gate", self.head_dim), (f"{self.at}.in_x", self.head_dim))
        size = self.state_size
        chosen = ((f"{self.at}.x_b", size), (f"{self.at}.x_c", size), (f"{self.at}.x_low", self.rank))
        return Fused(f"{self.at}.in_proj", of_head, self.heads), Fused(f"{self.at}.bcdt_proj", chosen)

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        _, recurrent = super().state(tp_size)
        return (Kept("history", (self.conv_width - 1, self.inner // tp_size)), recurrent)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, inner = dict(super().declare(spec)), Axis(self.inner, unit=self.head_dim)
        del found["mixed"]
        return found | {
            "x": Linear(((f"{self.at}.in_x", inner),), spec.hidden_size),
            "convolve": Convolve(((f"{self.at}.conv1d", inner),), self.conv_width, activation="silu"),
            "shared": Linear(tuple((f"{self.at}.x_{name}", self.state_size) for name in "bc"), inner),
            "low": Linear(((f"{self.at}.x_low", self.rank),), inner),
            "steps": Linear(((f"{self.at}.dt_proj", Axis(self.heads)),), self.rank),
            "norm_of_b": self._norm("B_norm", self.state_size),
            "norm_of_c": self._norm("C_norm", self.state_size),
            "norm_of_steps": self._norm("dt_norm", self.rank),
            "joined": JoinedColumns(),
        }

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(f"{self.at}.{name}", size, "rms", self.norm_eps, weight_offset=0.0, affine=True)

    def results(self, ops: LayerOps, held: Held, x: Any) -> Any:
        size, gate = self.state_size, ops.linear(held["gate"], x)
        mixed = ops.mix(held["convolve"], ops.linear(held["x"], x))
        shared = ops.total([ops.linear(held["shared"], mixed)])
        shared = ops.norm(held["norm_of_b"], shared, 0, size)
        shared = ops.norm(held["norm_of_c"], shared, size, 2 * size)
        low = ops.norm(held["norm_of_steps"], ops.total([ops.linear(held["low"], mixed)]))
        steps = ops.linear(held["steps"], low)
        return ops.mix(held["scan"], ops.compute(held["joined"], mixed, shared), steps, gate)

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + self._own_mixed(tp_size) + self.rank

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        if tp_size > 1 and max(self.rank, 2 * self.state_size) > spec.hidden_size:
            return f"its ranks have room for sums of {spec.hidden_size} columns."
        return super().why_no_program(spec, tp_size)

    def problem(self) -> str:
        return super().problem() if self.rank >= 1 else f"a recurrent layer's rank must be at least 1, got {self.rank}"
