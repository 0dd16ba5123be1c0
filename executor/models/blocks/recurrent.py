"""Mamba 2's mixer: it keeps a matrix per head, which every token decays and adds to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, Kept
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, StateMixer, Vector, Weight
from headrace.executor.models.blocks.gated_norm import GatedNorm
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class Scan(Declared):
    """The recurrence of Mamba 2 over a sequence's tokens: see `kernels.reference.states.scan`.

    mix(mixed, steps, gate): each head's input (head_dim columns), then each group's B, then C (state_size columns); a
    column per head; as the heads' inputs -> the heads' results times silu(gate); reads and writes the sequences'
    states."""

    eager_reader = "headrace.executor.models.eager_states:EagerScan"
    program_reader = "headrace.executor.cpu.recurrent:CpuScan.read"

    num_heads: int
    """Heads and groups of all ranks together."""
    head_dim: int
    state_size: int
    num_groups: int
    """Groups of heads; those of a group share their input and output vectors (B and C)."""
    decay: Vector
    """Logarithm of each head's rate of decay."""
    skip: Vector
    """Each head's weight of its input in its result."""
    step_bias: Vector
    step_limits: tuple[float, float] = (0.0, math.inf)
    """Range of time steps, to which they are clipped."""

    def weights(self) -> Iterator[Weight]:
        for each in (self.decay, self.skip, self.step_bias):
            yield from each.weights()


@dataclass(frozen=True)
class Ssd(StateMixer):
    """Mamba 2's mixer (Dao and Gu 2024): a short convolution of each head's input and of B and C, the recurrence, a
    gate and a norm of each group of heads."""

    cpu_alone = ""

    heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    groups: int = 1
    """Groups of heads; those of a group share B and C."""
    conv_width: int = 4
    norm_eps: float = 1e-5
    bias: bool = False
    """Whether the input and output projections have biases."""
    conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    output_bias: bool | None = None
    """Whether the output projection has one; None: as the input's."""
    normed: bool = True
    """Whether the gated results are normed."""
    at: str = "mixer"
    """What the names of its weights begin with."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def _shared(self) -> int:
        """Size of B, and of C."""
        return self.groups * self.state_size

    @property
    def _mixed(self) -> tuple[tuple[str, int], ...]:
        return (("x", self.inner), ("b", self._shared), ("c", self._shared))

    def fused(self) -> tuple[Fused, ...]:
        """How checkpoints store the input projection and the convolution."""
        mixed = tuple((f"{self.at}.in_{name}", size) for name, size in self._mixed)
        projection = ((f"{self.at}.in_gate", self.inner), *mixed, (f"{self.at}.in_steps", self.heads))
        convolved = tuple((f"{self.at}.conv_{name}", size) for name, size in self._mixed)
        return Fused(f"{self.at}.in_proj", projection), Fused(f"{self.at}.conv1d", convolved)

    def _own_mixed(self, tp_size: int) -> int:
        """Columns of x, B and C on one rank; with fewer groups than ranks, several have the same group."""
        return self.inner // tp_size + 2 * max(1, self.groups // tp_size) * self.state_size

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        channels = self._own_mixed(tp_size)
        return (
            Kept("history", (self.conv_width - 1, channels)),
            Kept("state", (self.heads // tp_size, self.head_dim, self.state_size)),
        )

    def draft_elements(self, tp_size: int) -> int:
        """The convolution's inputs, then the recurrence's, with each head's time step."""
        return 2 * self._own_mixed(tp_size) + self.heads // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        hidden, heads = spec.hidden_size, Axis(self.heads)
        inner = Axis(self.inner, unit=self.head_dim)
        shared = Axis(self._shared, unit=self.state_size)
        axes = {"x": inner, "b": shared, "c": shared}
        output_bias = self.bias if self.output_bias is None else self.output_bias
        found: dict[str, Declared] = {
            "gate": Linear(((f"{self.at}.in_gate", inner),), hidden, self.bias),
            "mixed": Linear(tuple((f"{self.at}.in_{name}", axis) for name, axis in axes.items()), hidden, self.bias),
            "steps": Linear(((f"{self.at}.in_steps", heads),), hidden, self.bias),
            "convolve": Convolve(
                tuple((f"{self.at}.conv_{name}", axis) for name, axis in axes.items()),
                self.conv_width,
                self.conv_bias,
                activation="silu",
            ),
            "scan": Scan(
                self.heads,
                self.head_dim,
                self.state_size,
                self.groups,
                decay=Vector(f"{self.at}.A_log", heads),
                skip=Vector(f"{self.at}.D", heads),
                step_bias=Vector(f"{self.at}.dt_bias", heads),
                step_limits=self.step_limits,
            ),
            "output": Linear(((f"{self.at}.out_proj", hidden),), inner, output_bias),
        }
        if self.normed:
            found["norm"] = GatedNorm(f"{self.at}.norm", inner, self.inner // self.groups, self.norm_eps)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        return [ops.product(held["output"], self.results(ops, held, x))]

    def results(self, ops: LayerOps, held: Held, x: Any) -> Any:
        """What the output projection reads."""
        mixed = ops.mix(held["convolve"], ops.linear(held["mixed"], x))
        scanned = ops.mix(held["scan"], mixed, ops.linear(held["steps"], x), ops.linear(held["gate"], x))
        return ops.compute(held["norm"], scanned) if self.normed else scanned

    def for_ranks(self, tp_size: int, inner_block: int) -> Ssd:
        """Ranks divide the groups of heads, since each is normed as a whole; or all have the only group, whose heads
        they divide."""
        divides = not self.groups % tp_size or self.groups == 1 or (not self.normed and not tp_size % self.groups)
        if self.heads % tp_size or not divides:
            raise ModelError(
                f"{self.heads} heads in {self.groups} groups cannot be divided among {tp_size} ranks: a rank computes "
                "whole groups, or a part of the only one"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        """Projections, the convolution's and the recurrence's results."""
        return 2 * self._own_mixed(tp_size) + (3 * self.inner + self.heads) // tp_size

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        if not self.groups % tp_size or not self.normed:
            return ""
        return "the program norms whole groups of heads, and ranks have a part of the only one."

    def problem(self) -> str:
        sizes = ("heads", "head_dim", "state_size", "groups")
        for name in sizes:
            if getattr(self, name) < 1:
                return f"a recurrent layer's {name} must be at least 1, got {getattr(self, name)}"
        if self.heads % self.groups:
            return f"{self.heads} heads cannot be divided into {self.groups} groups evenly"
        low, high = self.step_limits
        if not 0 <= low <= high:
            return f"the limits of time steps are {low} and {high}; they must not be negative, and ascend"
        return "" if self.conv_width >= 2 else f"a convolution's width must be at least 2, got {self.conv_width}"
