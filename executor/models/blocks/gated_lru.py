"""Griffin's recurrent block (De et al. 2024): a short convolution and a gated linear recurrence of each channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, Kept
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, StateMixer, Vector, Weight
from headrace.executor.models.blocks.gated_norm import GateActivation, OutputGate
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class Lru(Declared):
    """The recurrence over a sequence's tokens: see `kernels.reference.gated_lru`.

    mix(x): [num_tokens, channels] -> the same; reads and writes the sequences' states."""

    eager_reader = "headrace.executor.models.eager_states:EagerLru"
    program_reader = "headrace.executor.cpu.recurrent:CpuLru.read"

    at: str
    heads: int
    """Groups of channels, each of which its gates mix."""
    head_dim: int

    def vectors(self) -> Mapping[str, Vector]:
        heads, dim = self.heads, self.head_dim
        channels, matrices = Axis(heads * dim, unit=dim), Axis(heads * dim * dim, unit=dim * dim)
        found = {"decay": Vector(f"{self.at}.recurrent_param", channels)}
        for key, name in (("input", "input_gate"), ("recurrence", "recurrent_gate")):
            found[f"{key}_weight"] = Vector(f"{self.at}.{name}_weight", matrices, stored=(heads, dim, dim))
            found[f"{key}_bias"] = Vector(f"{self.at}.{name}_bias", channels, stored=(heads, dim))
        return found

    def weights(self) -> Iterator[Weight]:
        for each in self.vectors().values():
            yield from each.weights()


@dataclass(frozen=True)
class GatedLru(StateMixer):
    """output(recurrence(convolution(x)) * activation(y)), where x and y are projections of the layer's input."""

    cpu_alone = "gated linear recurrent units"

    heads: int = 0
    head_dim: int = 0
    conv_width: int = 4
    activation: GateActivation = "gelu_tanh"
    at: str = "temporal_block"

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (
            Kept("history", (self.conv_width - 1, self.channels // tp_size)),
            Kept("state", (self.heads // tp_size, self.head_dim)),
        )

    def draft_elements(self, tp_size: int) -> int:
        """The convolution's inputs, then the recurrence's."""
        return 2 * self.channels // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, hidden, channels = self.at, spec.hidden_size, Axis(self.channels, unit=self.head_dim)
        return {
            "x": Linear(((f"{at}.linear_x", channels),), hidden, bias=True),
            "gate": Linear(((f"{at}.linear_y", channels),), hidden, bias=True),
            "gated": OutputGate(self.activation),
            "convolve": Convolve(((f"{at}.conv_1d", channels),), self.conv_width, bias=True),
            "recur": Lru(f"{at}.rg_lru", self.heads, self.head_dim),
            "output": Linear(((f"{at}.linear_out", hidden),), channels, bias=True),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        mixed = ops.mix(held["recur"], ops.mix(held["convolve"], ops.linear(held["x"], x)))
        return [ops.product(held["output"], ops.compute(held["gated"], mixed, ops.linear(held["gate"], x)))]

    def for_ranks(self, tp_size: int, inner_block: int) -> GatedLru:
        if self.heads % tp_size:
            raise ModelError(f"{self.heads} heads of a linear recurrence cannot be divided among {tp_size} ranks")
        return self

    def values_per_token(self, tp_size: int) -> int:
        return 8 * self.channels // tp_size

    def problem(self) -> str:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                return f"a linear recurrence's {name} must be at least 1, got {getattr(self, name)}"
        return "" if self.conv_width >= 2 else f"a convolution's width must be at least 2, got {self.conv_width}"
