"""A gated short convolution (LFM2: Liquid AI 2025): two gates around a causal convolution over a few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, Fused, Kept
from headrace.executor.models.blocks import Axis, Declared, Dimension, Held, LayerOps, Linear, StateMixer, Weight
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class Convolve(Declared):
    """A causal convolution of each channel over a sequence's tokens (depthwise), which keeps its last inputs.

    mix(x): [num_tokens, channels], or three times as many where `gated` -> [num_tokens, channels]; reads and writes the
    sequences' states."""

    eager_reader = "headrace.executor.models.eager_states:EagerConvolve"
    program_reader = "headrace.executor.cpu.recurrent:CpuConvolve.read"

    matrices: tuple[tuple[str, Dimension], ...]
    """(name without `.weight`, channels) of each part, whose channels lie side by side."""
    width: int
    """A token's result reads its own input and width - 1 inputs before it."""
    bias: bool = False
    activation: Literal["silu"] | None = None
    gated: bool = False
    """Whether inputs come as (b, c, x), three times the channels, and the result is c * convolution of (b * x)."""
    distance: int = 1
    """Of neighbouring inputs that are read, in tokens."""
    residual: bool = False
    """Whether the input itself is added to the result."""
    history: str = "history"
    """Name of the `Kept` that has its last inputs."""
    first_draft_element: int = 0
    """Where in a draft's kept input those of this op begin."""

    def weights(self) -> Iterator[Weight]:
        for name, channels in self.matrices:
            yield Weight(f"{name}.weight", (channels, 1, self.width), "bias")
            if self.bias:
                yield Weight(f"{name}.bias", (channels,), "bias")


PARTS = ("conv.in_b", "conv.in_c", "conv.in_x")
"""Parts of the input projection: the gates before and after the convolution, and its input."""


@dataclass(frozen=True)
class ShortConv(StateMixer):
    """output(c * convolution(b * x)), where b, c and x are projections of the layer's input."""

    cpu_alone = ""
    channels: int = 0
    width: int = 3
    """A token's convolution reads its own input and the width - 1 inputs before it."""
    bias: bool = False

    @staticmethod
    def fused(channels: int) -> Fused:
        """How checkpoints store the input projection."""
        return Fused("conv.in_proj", tuple((name, channels) for name in PARTS))

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (Kept("history", (self.width - 1, self.channels // tp_size)),)

    def draft_elements(self, tp_size: int) -> int:
        return self.channels // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        channels = Axis(self.channels)
        return {
            "input": Linear(tuple((name, channels) for name in PARTS), spec.hidden_size, self.bias),
            "convolve": Convolve((("conv.conv", channels),), self.width, self.bias, gated=True),
            "output": Linear((("conv.out_proj", spec.hidden_size),), channels, self.bias),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        return [ops.product(held["output"], ops.mix(held["convolve"], ops.linear(held["input"], x)))]

    def for_ranks(self, tp_size: int, inner_block: int) -> ShortConv:
        if self.channels % tp_size:
            raise ModelError(f"{self.channels} channels of a convolution cannot be divided among {tp_size} ranks")
        return self

    def values_per_token(self, tp_size: int) -> int:
        return 4 * self.channels // tp_size

    def problem(self) -> str:
        if self.channels < 1:
            return f"a convolution needs at least one channel, got {self.channels}"
        return "" if self.width >= 2 else f"a convolution's width must be at least 2, got {self.width}"
