"""A mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated FFNs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import (
    Axis,
    Declared,
    ExpertStack,
    Ffn,
    Held,
    Linear,
    Ops,
    Routing,
    Vector,
    rounded_up,
)
from headrace.executor.models.blocks.dense import Activation
from headrace.executor.models.blocks.gated_norm import SoftCap

UNGATED: Mapping[str, Literal["relu", "normal_cdf"]] = {"relu2": "relu", "gelu": "normal_cdf"}
"""By the activation f of experts without a gate, that of the gate with which gated experts, whose gate and up
projection are one matrix, compute the same: relu(u) * u is the square of relu(u), and the probability of a standard
normal variable below u, times u, is gelu(u)."""
SHARED = Routing(num_chosen=1, scoring="sigmoid", renormalise=False)
"""Routing of a gated shared expert: the only expert of its stack, weighted by the sigmoid of its gate's logit."""


@dataclass(frozen=True)
class Experts(Ffn):
    num_experts: int
    routing: Routing
    inner: int
    """Inner size of each expert."""
    activation: Activation | Literal["clamped_silu", "normal_cdf"]
    shared_inner: int = 0
    """Inner size of the shared expert, which every token uses besides the chosen ones; 0: there is none."""
    shared_activation: Activation | None = None
    """Of the shared expert without a gate; None: that of the others."""
    shared_gate: bool = True
    """Whether the shared expert's result is weighted by a gate of its own."""
    router_bias: bool = False
    expert_bias: bool = False
    """Whether the experts' matrices have biases."""
    correction: Literal["no", "vector", "row"] = "no"
    """Whether a vector is added to the scores when experts are chosen, and whether it is stored as [num_experts]
    ("vector") or [1, num_experts] ("row")."""
    correction_optional: bool = False
    """Whether checkpoints may leave the vector out, which is then zero."""
    logit_cap: float | None = None
    """The router's logits become logit_cap * tanh(logit / logit_cap); None: they stay as they are."""

    @property
    def chosen_share(self) -> float:
        return self.routing.num_chosen / self.num_experts

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, hidden = spec.names, spec.hidden_size
        router = Linear(((names.router, self.num_experts),), hidden, self.router_bias, role="router")
        each = [f"{names.experts}.{index}." for index in range(self.num_experts)]
        found: dict[str, Declared] = {"router": router, "experts": self._stack(spec, each, self.inner)}
        if self.correction != "no":
            stored = (1, None) if self.correction == "row" else (None,)
            found["correction"] = Vector(names.router_correction, self.num_experts, stored, self.correction_optional)
        if self.logit_cap is not None:
            found["cap"] = SoftCap(self.logit_cap)
        if self.shared_inner and not self.shared_gate:
            gate, up, down = (
                f"{names.shared_expert}.{name}" for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            inner = Axis(self.shared_inner)
            kind = self.shared_activation or self.activation
            found["shared_up"] = Linear(((gate, inner), (up, inner)), hidden, activation=kind, gated=True)
            found["shared_down"] = Linear(((down, hidden),), inner)
        elif self.shared_inner:
            found["shared_router"] = Linear(((names.shared_router, 1),), hidden, role="router")
            found["shared"] = self._stack(spec, [f"{names.shared_expert}."], self.shared_inner)
        return found

    def _stack(self, spec: ArchSpec, prefixes: Sequence[str], inner: int) -> ExpertStack:
        gates, ups, downs = (
            tuple(prefix + name for prefix in prefixes)
            for name in (spec.names.expert_gate, spec.names.expert_up, spec.names.expert_down)
        )
        return ExpertStack(gates, ups, downs, spec.hidden_size, Axis(inner), self.activation, self.expert_bias)

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        logits = ops.linear(held["router"], x)
        if "cap" in held:
            logits = ops.compute(held["cap"], logits)
        found = [self.routed(ops, held, x, logits)]
        if self.shared_inner and not self.shared_gate:
            found.append(ops.product(held["shared_down"], ops.linear(held["shared_up"], x)))
        elif self.shared_inner:
            found.append(ops.experts(held["shared"], x, ops.linear(held["shared_router"], x), SHARED))
        return found

    def routed(self, ops: Ops, held: Held, x: Any, logits: Any) -> Any:
        """The summed results of the experts that the router chooses."""
        return ops.experts(held["experts"], x, logits, self.routing, held.get("correction"))

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        """Pads inner sizes, since each rank has a share of each expert's inner columns, and the whole router."""
        if tp_size == 1:
            return self
        inner, shared = (rounded_up(size, tp_size * inner_block) for size in (self.inner, self.shared_inner))
        return replace(self, inner=inner, shared_inner=shared)

    def values_per_token(self, tp_size: int) -> int:
        """The router's logits, and of each chosen expert gate, up projection and their product."""
        inner = 3 * (self.routing.num_chosen * self.inner + self.shared_inner) // tp_size
        return self.num_experts + inner

    def problem(self) -> str:
        if self.logit_cap is not None and not 0 < self.logit_cap < math.inf:
            return f"the cap of the router's logits must be positive, got {self.logit_cap}"
        if self.inner < 1:
            return f"an expert's inner size must be at least 1, got {self.inner}"
        if not 1 <= self.routing.num_chosen <= self.num_experts:
            return f"{self.routing.num_chosen} of {self.num_experts} experts cannot be chosen for a token"
        return self.routing.groups.why_not(self.num_experts, self.routing.num_chosen)
