"""Experts that compute the input of the layer's attention, beside a dense FFN that computes its output (Snowflake
Arctic): so they need not wait for attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Declared, Ffn, Held, LayerOps, Norm, WithoutWeights
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts

DENSE = "dense."


@dataclass(frozen=True)
class KeptInput(WithoutWeights, Declared):
    """mix(x): keeps x for a `TakenInput` of the same layer."""

    eager_reader = "headrace.executor.models.eager_early:EagerKeptInput"
    program_reader = "headrace.executor.cpu.early:CpuKeptInput.read"


@dataclass(frozen=True)
class TakenInput(WithoutWeights, Declared):
    """mix(x): what was kept, of the tokens of x."""

    eager_reader = "headrace.executor.models.eager_early:EagerTakenInput"
    program_reader = "headrace.executor.cpu.early:CpuTakenInput.read"


@dataclass(frozen=True)
class AttentionBesideExperts(Attention):
    """Attention that leaves the layer's input to experts, with a norm of theirs."""

    experts_norm: str = ""
    """Its name, without `.weight`."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        norm = Norm.of_stream(spec, self.experts_norm)
        return {**super().declare(spec), "experts_norm": norm, "kept": KeptInput()}

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        qkv = ops.linear(held["qkv"], x)
        ops.mix(held["kept"], ops.normed(held["experts_norm"]))  # which may overwrite x
        return [ops.product(held["output"], ops.mix(held["attend"], qkv))]

    def values_per_token(self, tp_size: int) -> int:
        """Besides those of attention, what is kept, for which that many values are enough."""
        return super().values_per_token(tp_size) + self.num_heads * self.head_dim


@dataclass(frozen=True)
class EarlyExperts(Ffn):
    """A dense FFN, and experts of what the layer's mixer has kept."""

    dense: Dense
    experts: Experts

    @property
    def inner(self) -> int:  # type: ignore[override]
        return max(self.dense.inner, self.experts.inner)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        dense = {DENSE + name: each for name, each in self.dense.declare(spec).items()}
        return {**dense, **self.experts.declare(spec), "taken": TakenInput()}

    def emit(self, ops: Any, held: Held, x: Any) -> Sequence[Any]:
        dense = {name.removeprefix(DENSE): each for name, each in held.items() if name.startswith(DENSE)}
        found = [*self.dense.emit(ops, dense, x)]
        return [*found, *self.experts.emit(ops, held, ops.mix(held["taken"], x))]

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        dense = self.dense.for_ranks(tp_size, inner_block)
        return replace(self, dense=dense, experts=self.experts.for_ranks(tp_size, inner_block))

    def values_per_token(self, tp_size: int) -> int:
        return self.dense.values_per_token(tp_size) + self.experts.values_per_token(tp_size)

    def problem(self) -> str:
        return self.dense.problem() or self.experts.problem()
