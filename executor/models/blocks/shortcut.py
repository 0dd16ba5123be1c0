"""Experts whose results are added one layer later, so that they can be computed beside that layer (ScMoE: Cai et al.
2024), and some of which do nothing (LongCat-Flash: Meituan 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Declared, ExpertStack, Ffn, Held, WithoutWeights
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention

DENSE = "dense."
NO_PROGRAM = "the program adds no results of an earlier layer's experts."


@dataclass(frozen=True, kw_only=True)
class ExpertsAndIdle(ExpertStack):
    """An `ExpertStack`, and `num_idle` further experts behind it that return what they are given."""

    eager_reader = "headrace.executor.models.eager_shortcut:EagerExpertsAndIdle"
    program_reader = ""

    num_idle: int

    @property
    def num_unread(self) -> int:
        return self.num_idle


@dataclass(frozen=True)
class Shortcut(WithoutWeights, Declared):
    """mix(x): keeps x for a later layer of the same pass. mix(): returns what was kept."""

    eager_reader = "headrace.executor.models.eager_shortcut:EagerShortcut.read"
    program_reader = "headrace.executor.cpu.looped:CpuShortcut.read"


@dataclass(frozen=True)
class LatentAttentionAfter(LatentAttention):
    """In a layer whose FFN adds what the layer before it kept."""

    @property
    def follows(self) -> bool:
        return True


@dataclass(frozen=True)
class ShortcutFfn(Ffn):
    """A dense FFN. In the first of two layers, experts compute the same input; in the second, their result is added."""

    dense: Dense
    experts: Experts | None
    """None in the second layer."""
    num_idle: int = 0

    @property
    def inner(self) -> int:  # type: ignore[override]
        return max(self.dense.inner, self.experts.inner if self.experts is not None else 0)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found: dict[str, Declared] = {DENSE + name: each for name, each in self.dense.declare(spec).items()}
        found["shortcut"] = Shortcut()
        if self.experts is None:
            return found
        own = replace(self.experts, num_experts=self.experts.num_experts + self.num_idle).declare(spec)
        stack = self.experts.declare(spec)["experts"]
        assert isinstance(stack, ExpertStack)
        return {**found, **own, "experts": ExpertsAndIdle(**vars(stack), num_idle=self.num_idle)}

    def emit(self, ops: Any, held: Held, x: Any) -> Sequence[Any]:
        dense = {name.removeprefix(DENSE): each for name, each in held.items() if name.startswith(DENSE)}
        found = [*self.dense.emit(ops, dense, x)]
        if self.experts is None:
            return [*found, ops.mix(held["shortcut"])]
        logits = ops.linear(held["router"], x)
        added = ops.experts(held["experts"], x, logits, self.experts.routing, held.get("correction"))
        ops.mix(held["shortcut"], added)
        return found

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        dense = self.dense.for_ranks(tp_size, inner_block)
        experts = self.experts and self.experts.for_ranks(tp_size, inner_block)
        return replace(self, dense=dense, experts=experts)

    def values_per_token(self, tp_size: int) -> int:
        own = self.experts.values_per_token(tp_size) if self.experts is not None else 0
        return self.dense.values_per_token(tp_size) + own

    def problem(self) -> str:
        if self.experts is None:
            return self.dense.problem()
        whole = replace(self.experts, num_experts=self.experts.num_experts + self.num_idle)
        return self.dense.problem() or whole.problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return NO_PROGRAM
