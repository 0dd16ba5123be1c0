"""Experts of which some are chosen for every token: the router gives these weights, too, which add up to one with those
of the experts that it chooses (Inkling: Thinking Machines 2026)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Declared, ExpertStack, Held, Ops, Vector, Weight
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.tensor_ops import scaled

NO_PROGRAM = "the program multiplies no result by a number of the checkpoint's."


@dataclass(frozen=True)
class SinkCorrection(Declared):
    """A router's correction, in which the last experts are above all others, whatever their scores' sigmoids."""

    eager_reader = program_reader = "headrace.executor.models.eager_relative:sink_correction"

    num_routed: int
    num_sinks: int
    routed: Vector | None
    """Of the others; None: it is zero."""

    def weights(self) -> Iterator[Weight]:
        if self.routed is not None:
            yield from self.routed.weights()


@dataclass(frozen=True)
class EqualFactors(Declared):
    """One number as a vector of `count` equal ones."""

    eager_reader = program_reader = "headrace.executor.models.eager_relative:equal_factors"

    name: str
    """Complete."""
    count: int

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.name, (1,), "bias")


@dataclass(frozen=True, kw_only=True)
class SinkExperts(Experts):
    """`num_experts` and the number of chosen ones include the sinks, which are the last ones. Scores are sigmoids."""

    num_sinks: int
    corrects: bool
    """Whether checkpoints have a correction of the others."""
    scaled: bool
    """Whether all results are multiplied by a number of the checkpoint's."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, names = dict(super().declare(spec)), spec.names
        num_routed = self.num_experts - self.num_sinks
        routed = Vector(names.router_correction, num_routed) if self.corrects else None
        found["correction"] = SinkCorrection(num_routed, self.num_sinks, routed)
        if self.scaled:
            stack = found["experts"]
            assert isinstance(stack, ExpertStack), "as experts declare it"
            found["experts"] = replace(stack, factors=EqualFactors(f"{names.router}.global_scale", self.num_experts))
        return found

    def problem(self) -> str:
        if self.num_sinks < 1 or self.num_sinks >= self.routing.num_chosen:
            return f"{self.num_sinks} of {self.routing.num_chosen} experts of a token are those of every token"
        return super().problem()


@dataclass(frozen=True)
class ScaledDense(Dense):
    """An FFN whose result is multiplied by a number of the checkpoint's."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {**super().declare(spec), "scale": Vector("mlp.global_scale", 1)}

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        return [ops.call(scaled, ops.linear(held["down"], ops.linear(held["up"], x)), held["scale"])]

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return NO_PROGRAM
