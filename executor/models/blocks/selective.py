"""Mamba's mixer (Gu and Dao 2023): each channel keeps a small vector, whose decay its time step chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, Fused, Kept
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, Norm, StateMixer, Vector, Weight
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class SelectiveScan(Declared):
    """The recurrence over a sequence's tokens: see `kernels.reference.selective`.

    mix(x, steps, shared, gate): a column per channel; likewise; B and C of all channels; a column per channel -> the
    channels' results times silu(gate). Reads and writes the sequences' states."""

    eager_reader = "headrace.executor.models.eager_states:EagerSelectiveScan"
    program_reader = "headrace.executor.cpu.recurrent:CpuSelectiveScan.read"

    channels: Axis
    state_size: int
    decay: str
    """Complete name of the logarithms of the rates of decay, [channels, state_size]."""
    skip: Vector

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.decay, (self.channels, self.state_size), "bias")
        yield from self.skip.weights()


@dataclass(frozen=True)
class Selective(StateMixer):
    """A short convolution, projections of its result to time steps, B and C, and the recurrence. Names of weights are
    relative to `at`."""

    cpu_alone = "Mamba's selective scan"

    channels: int = 0
    state_size: int = 16
    rank: int = 0
    """Inner size of the projection to time steps."""
    conv_width: int = 4
    bias: bool = False
    """Whether the input and output projections have biases."""
    conv_bias: bool = True
    norms: Literal["no", "plain", "weighted"] = "no"
    """RMS norms of the vector that time steps are projected from, of B and of C: without weights, or with them."""
    norm_eps: float = 1e-6
    at: str = "mixer"

    @property
    def _normed(self) -> dict[str, tuple[str, str, int]]:
        """From the key of a norm to the key of what it norms, its name and its size."""
        return {
            "norm_of_steps": ("low", "dt_layernorm", self.rank),
            "norm_of_b": ("b", "b_layernorm", self.state_size),
            "norm_of_c": ("c", "c_layernorm", self.state_size),
        }

    def fused(self) -> tuple[Fused, ...]:
        """How checkpoints store the projections."""
        mixed = ((f"{self.at}.in_x", self.channels), (f"{self.at}.in_gate", self.channels))
        size = self.state_size
        chosen = ((f"{self.at}.x_low", self.rank), (f"{self.at}.x_b", size), (f"{self.at}.x_c", size))
        return Fused(f"{self.at}.in_proj", mixed), Fused(f"{self.at}.x_proj", chosen)

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        own = self.channels // tp_size
        return (Kept("history", (self.conv_width - 1, own)), Kept("state", (self.state_size, own)))

    def draft_elements(self, tp_size: int) -> int:
        """The convolution's inputs, then the recurrence's."""
        return 3 * self.channels // tp_size + 2 * self.state_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, hidden, channels = self.at, spec.hidden_size, Axis(self.channels)
        found: dict[str, Declared] = {
            "x": Linear(((f"{at}.in_x", channels),), hidden, self.bias),
            "gate": Linear(((f"{at}.in_gate", channels),), hidden, self.bias),
            "convolve": Convolve(((f"{at}.conv1d", channels),), self.conv_width, self.conv_bias, activation="silu"),
            "low": Linear(((f"{at}.x_low", self.rank),), channels),
            "shared": Linear(tuple((f"{at}.x_{name}", self.state_size) for name in "bc"), channels),
            "steps": Linear(((f"{at}.dt_proj", channels),), self.rank, bias=True),
            "scan": SelectiveScan(channels, self.state_size, f"{at}.A_log", Vector(f"{at}.D", channels)),
            "output": Linear(((f"{at}.out_proj", hidden),), channels, self.bias),
        }
        if self.norms != "no":
            affine = self.norms == "weighted"
            for key, (_, name, size) in self._normed.items():
                found[key] = Norm(f"{at}.{name}", size, "rms", self.norm_eps, 0.0, affine)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        size = self.state_size
        gate = ops.linear(held["gate"], x)
        mixed = ops.mix(held["convolve"], ops.linear(held["x"], x))
        low = ops.total([ops.linear(held["low"], mixed)])
        shared = ops.total([ops.linear(held["shared"], mixed)])
        if self.norms != "no":
            low = ops.norm(held["norm_of_steps"], low)
            shared = ops.norm(held["norm_of_b"], shared, 0, size)
            shared = ops.norm(held["norm_of_c"], shared, size, 2 * size)
        scanned = ops.mix(held["scan"], mixed, ops.linear(held["steps"], low), shared, gate)
        return [ops.product(held["output"], scanned)]

    def for_ranks(self, tp_size: int, inner_block: int) -> Selective:
        if self.channels % tp_size:
            raise ModelError(f"{self.channels} channels of a selective scan cannot be divided among {tp_size} ranks")
        return self

    def values_per_token(self, tp_size: int) -> int:
        """Projections, the convolution's and the recurrence's results."""
        return 5 * self.channels // tp_size + 2 * (self.rank + 2 * self.state_size)

    def problem(self) -> str:
        for name in ("channels", "state_size", "rank"):
            if getattr(self, name) < 1:
                return f"a selective scan's {name} must be at least 1, got {getattr(self, name)}"
        return "" if self.conv_width >= 2 else f"a convolution's width must be at least 2, got {self.conv_width}"
