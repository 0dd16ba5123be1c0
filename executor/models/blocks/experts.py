"""A mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated FFNs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    rounded_up,
)
from headrace.executor.models.blocks.dense import Activation

SHARED = Routing(num_chosen=1, scoring="sigmoid", renormalise=False)
"""The shared expert is one of one, weighted by the sigmoid of its gate."""


@dataclass(frozen=True)
class Experts(Ffn):
    num_experts: int
    routing: Routing
    inner: int
    """Of each expert."""
    activation: Activation
    shared_inner: int = 0
    """Of an expert that every token goes to, beside those chosen, weighted by a gate of its own; 0 for none."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, hidden = spec.names, spec.hidden_size
        router = Linear(((names.router, self.num_experts),), hidden, role="router")
        each = [f"{names.experts}.{index}." for index in range(self.num_experts)]
        found: dict[str, Declared] = {"router": router, "experts": self._stack(spec, each, self.inner)}
        if self.shared_inner:
            found["shared_router"] = Linear(((names.shared_router, 1),), hidden, role="router")
            found["shared"] = self._stack(spec, [f"{names.shared_expert}."], self.shared_inner)
        return found

    def _stack(self, spec: ArchSpec, prefixes: Sequence[str], inner: int) -> ExpertStack:
        gates, ups, downs = (
            tuple(prefix + name for prefix in prefixes)
            for name in (spec.names.expert_gate, spec.names.expert_up, spec.names.expert_down)
        )
        return ExpertStack(gates, ups, downs, spec.hidden_size, Axis(inner), self.activation)

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        found = [ops.experts(held["experts"], x, ops.linear(held["router"], x), self.routing)]
        if self.shared_inner:
            found.append(ops.experts(held["shared"], x, ops.linear(held["shared_router"], x), SHARED))
        return found

    def for_ranks(self, tp_size: int, inner_block: int) -> Experts:
        """Every rank has a share of each expert, and the whole router."""
        if tp_size == 1:
            return self
        inner, shared = (rounded_up(size, tp_size * inner_block) for size in (self.inner, self.shared_inner))
        return replace(self, inner=inner, shared_inner=shared)

    def values_per_token(self, tp_size: int) -> int:
        """The router's logits; of each chosen expert both halves and their product, and its result."""
        inner = 3 * (self.routing.num_chosen * self.inner + self.shared_inner) // tp_size
        return self.num_experts + inner

    def problem(self) -> str:
        if self.inner < 1:
            return f"an expert's inner size must be at least 1, got {self.inner}"
        if not 1 <= self.routing.num_chosen <= self.num_experts:
            return f"{self.routing.num_chosen} of {self.num_experts} experts cannot be chosen for a token"
        return ""

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        if spec.norm_placement == "post":
            return "the program adds experts' results to another stream than they read, and here both are one."
        return ""
