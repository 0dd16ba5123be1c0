"""Attention of layers that run several times (IQuest-Coder-Loop): the first run attends to all tokens, further runs to
the near ones' keys of their own and to all of the first run's, and a gate of each head mixes the two results.

A further run is two layers of a spec, since each attends to one cache: the near one, which leaves its queries to the
far one, without an FFN; and the far one. As the output projection is linear, each adds its part to the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, RopeSpec
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    Held,
    LayerOps,
    Linear,
    Weight,
    WithoutWeights,
)
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.gated_norm import JoinedColumns, OutputGate
from headrace.executor.models.blocks.shortcut import Shortcut

Run = Literal["first", "near", "far"]


@dataclass(frozen=True)
class RotatedHeads(WithoutWeights, Declared):
    """mix(queries): a copy of them, each head rotated to its token's position."""

    eager_reader = "headrace.executor.models.eager_looped:EagerRotatedHeads"
    program_reader = "headrace.executor.cpu.looped:CpuRotatedHeads.read"

    head_dim: int
    rope: RopeSpec


@dataclass(frozen=True)
class HeadGates(Declared):
    """compute(heads): one number for each head, its product with a vector of its own, plus a bias: [num_tokens, heads *
    head_dim] -> [num_tokens, heads]."""

    eager_reader = "headrace.executor.models.eager_looped:EagerHeadGates"
    program_reader = "headrace.executor.cpu.looped:CpuHeadGates.read"

    name: str
    heads: Axis
    head_dim: int
    opposite: bool = False
    """Whether it is the negative number: the sigmoids of the two add up to one. Its weights are those of the other."""

    def weights(self) -> Iterator[Weight]:
        if not self.opposite:
            yield Weight(f"{self.name}.weight", (self.heads, self.head_dim), "bias")
            yield Weight(f"{self.name}.bias", (self.heads,), "bias")


@dataclass(frozen=True, kw_only=True)
class LoopedAttention(Attention):
    run: Run
    loop_window: int
    """A near layer's `sliding_window`."""

    @property
    def follows(self) -> bool:
        return self.run == "far"

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        """What all three read, which layers of one set of weights share."""
        found, heads = dict(super().declare(spec)), Axis(self.num_heads, groups=self.num_kv_heads)
        qkv, attend = found.pop("qkv"), found.pop("attend")
        assert isinstance(qkv, Linear), "as attention declares it"
        assert isinstance(attend, Attend), "as attention declares it"
        assert self.rope is not None, "queries are rotated"
        gates = HeadGates(spec.names.query_gate, heads, self.head_dim)
        return found | {
            "query": replace(qkv, matrices=qkv.matrices[:1]),
            "keys_and_values": replace(qkv, matrices=qkv.matrices[1:]),
            "joined": JoinedColumns(),
            "first": replace(attend, sliding_window=None),
            "near": replace(attend, sliding_window=self.loop_window),
            "far": replace(attend, sliding_window=None, reads_only=True),
            "rotated": RotatedHeads(self.head_dim, self.rope),
            "far_gate": gates,
            "near_gate": replace(gates, opposite=True),
            "gating": OutputGate("sigmoid", group=self.head_dim),
            "queries": Shortcut(),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        queries = ops.mix(held["queries"]) if self.run == "far" else ops.linear(held["query"], x)
        gate = None
        if self.run != "first":
            gate = ops.compute(held[f"{self.run}_gate"], ops.mix(held["rotated"], queries))
        if self.run == "near":
            ops.mix(held["queries"], queries)
        read = queries
        if self.run != "far":
            read = ops.compute(held["joined"], queries, ops.linear(held["keys_and_values"], x))
        attended = ops.mix(held[self.run], read)
        if gate is not None:
            attended = ops.compute(held["gating"], attended, gate)
        return [ops.product(held["output"], attended)]

    def problem(self) -> str:
        if self.loop_window < 1:
            return f"a window of {self.loop_window} in further runs; it must be at least 1"
        return super().problem()
