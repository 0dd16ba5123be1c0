"""Linear attention: mixers that keep a matrix per head, which a token's keys and values are added to after it decayed.

The delta rule also takes away what the key reads before its value is added (gated delta networks: Yang et al. 2025;
Kimi Delta Attention, with a decay for each channel of a key: Kimi Team 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, Fused, Kept, RopeSpec
from headrace.executor.models.blocks import Axis, Declared, Held, LayerOps, Linear, Norm, StateMixer, Vector, Weight
from headrace.executor.models.blocks.gated_norm import GateActivation, GatedNorm
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class LinearAttention(Declared):
    """The recurrence over a sequence's tokens: see `kernels.reference.linear_attention`.

    mix(mixed, decays, rates): each key head's query, each one's key, each head's value (columns); a column per head, or
    per channel of each head's keys; a column per head -> each head's result. mix(mixed) where the decay is constant and
    values are not corrected. Reads and writes the sequences' states."""

    eager_reader = "headrace.executor.models.eager_states:EagerLinearAttention"
    program_reader = "headrace.executor.cpu.recurrent:CpuLinearAttention.read"

    num_heads: int
    """Heads of values, here and in num_key_heads those of all ranks together."""
    num_key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    """Multiplies queries."""
    decay: Vector | None = None
    """Logarithm of each head's rate of decay."""
    decay_floor: float = 0.0
    """The least logarithm of a decay, which is negative; 0: there is none."""
    rates: tuple[float, ...] = ()
    """In the place of `decay`: each head's rate, where the model fixes it."""
    decay_bias: Vector | None = None
    """Added to decays; None: the decay is constant."""
    correction: float = 0.0
    """The largest share of a correction (the delta rule); 0: values are added as they are."""
    unit_keys: bool = False
    """Whether queries and keys are divided by their lengths."""
    tiled: bool = False
    """Whether heads of values use those of keys in turn, each rank having all of these; else neighbours share one."""
    convolved: bool = True
    """Whether a convolution computes `mixed`; its drafts' inputs are kept before these."""
    first_draft_element: int = 0
    """Where in a draft's kept input those of both begin."""

    def weights(self) -> Iterator[Weight]:
        for each in (self.decay, self.decay_bias):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True)
class DeltaNames:
    """Names of a mixer's weights."""

    query: str = "in_q"
    key: str = "in_k"
    value: str = "in_v"
    rates: str = "in_proj_b"
    decays: str = "in_proj_a"
    decays_down: str = ""
    gate: str = "in_proj_z"
    gate_down: str = ""
    convolutions: tuple[str, str, str] = ("conv_q", "conv_k", "conv_v")
    decay: str = "A_log"
    decay_bias: str = "dt_bias"
    norm: str = "norm"
    output: str = "out_proj"


@dataclass(frozen=True)
class DeltaRule(StateMixer):
    """A gated delta network's mixer: a short convolution of queries, keys and values, the recurrence, and a gated norm
    of each head. Names of weights are relative to `at`."""

    cpu_alone = ""

    heads: int = 0
    """Heads of values."""
    key_heads: int = 0
    """Heads of queries and keys; each serves as many neighbouring heads of values."""
    key_dim: int = 0
    value_dim: int = 0
    conv_width: int = 4
    norm_eps: float = 1e-6
    correction: float = 1.0
    """The largest share of a correction."""
    decay_floor: float = 0.0
    """As in `LinearAttention`."""
    decay_per_channel: bool = False
    """Whether each channel of a head's keys decays by itself, instead of the head."""
    rank: int = 0
    """Inner size of the projections to decays and gates, where each is a product of two matrices; 0: it is one."""
    gate: GateActivation = "silu"
    at: str = "linear_attn"
    tiled: bool = False
    """Whether heads of values use those of keys in turn, as in GGUF files, instead of neighbours sharing one."""
    names: DeltaNames = DeltaNames()

    decay_shape: tuple[int | None, ...] = (None,)
    """How the rates of decay are stored: see `Vector.stored`."""

    def fused(self) -> Fused:
        """How checkpoints store the convolution, if as one."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        parts = zip(self.names.convolutions, (keys, keys, values), strict=True)
        return Fused(f"{self.at}.conv1d", tuple((f"{self.at}.{name}", size) for name, size in parts))

    def _own_mixed(self, tp_size: int) -> int:
        """Columns of queries, keys and values on one rank; with fewer key heads than ranks, several have the same."""
        keys = self.key_dim * (self.key_heads if self.tiled else max(1, self.key_heads // tp_size))
        return 2 * keys + self.heads * self.value_dim // tp_size

    @property
    def first_draft_element(self) -> int:
        """Where in a draft's kept input its own begin."""
        return 0

    @property
    def _decays(self) -> int:
        return self.heads * (self.key_dim if self.decay_per_channel else 1)

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (
            Kept("history", (self.conv_width - 1, self._own_mixed(tp_size))),
            Kept("state", (self.heads // tp_size, self.key_dim, self.value_dim)),
        )

    def draft_elements(self, tp_size: int) -> int:
        """The convolution's inputs, then the recurrence's."""
        return 2 * self._own_mixed(tp_size) + (self._decays + self.heads) // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, names, hidden, heads = f"{self.at}.", self.names, spec.hidden_size, Axis(self.heads)
        columns = self.key_heads * self.key_dim
        keys = Axis(columns, unit=columns if self.tiled else self.key_dim)
        values = Axis(self.heads * self.value_dim, unit=self.value_dim)
        decays = Axis(self._decays, unit=self._decays // self.heads)
        axes, mixed = (keys, keys, values), (names.query, names.key, names.value)
        convolved = tuple((at + name, axis) for name, axis in zip(names.convolutions, axes, strict=True))
        found: dict[str, Declared] = {
            "mixed": Linear(tuple((at + name, axis) for name, axis in zip(mixed, axes, strict=True)), hidden),
            "rates": Linear(((at + names.rates, heads),), hidden),
            "convolve": Convolve(
                convolved, self.conv_width, activation="silu", first_draft_element=self.first_draft_element
            ),
            "attend": LinearAttention(
                self.heads,
                self.key_heads,
                self.key_dim,
                self.value_dim,
                scale=self.key_dim**-0.5,
                decay=Vector(at + names.decay, heads, self.decay_shape),
                decay_floor=self.decay_floor,
                decay_bias=Vector(at + names.decay_bias, decays),
                correction=self.correction,
                unit_keys=True,
                tiled=self.tiled,
                first_draft_element=self.first_draft_element,
            ),
            "norm": GatedNorm(at + names.norm, values, self.value_dim, self.norm_eps, self.gate, shared=True),
            "output": Linear(((at + names.output, hidden),), values),
        }
        if self.rank:
            found["decays_down"] = Linear(((at + names.decays_down, self.rank),), hidden)
            found["gate_down"] = Linear(((at + names.gate_down, self.rank),), hidden)
        found["decays"] = Linear(((at + names.decays, decays),), self.rank or hidden)
        found["gate"] = Linear(((at + names.gate, values),), self.rank or hidden)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        decays, gate = (
            ops.linear(held[key], ops.linear(held[f"{key}_down"], x) if self.rank else x) for key in ("decays", "gate")
        )
        mixed = ops.mix(held["convolve"], ops.linear(held["mixed"], x))
        attended = ops.mix(held["attend"], mixed, decays, ops.linear(held["rates"], x))
        return [ops.product(held["output"], ops.compute(held["norm"], attended, gate))]

    def for_ranks(self, tp_size: int, inner_block: int) -> DeltaRule:
        """Ranks divide the heads of values, and those of keys or copies of them."""
        divides = self.tiled or not self.key_heads % tp_size or not tp_size % self.key_heads
        if self.heads % tp_size or not divides:
            raise ModelError(
                f"{self.heads} heads of values and {self.key_heads} of keys cannot be divided among {tp_size} ranks; "
                "choose a divisor of both"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        """Projections, the convolution's and the recurrence's results."""
        values = self.heads * self.value_dim
        return 2 * self._own_mixed(tp_size) + (3 * values + self._decays + self.heads) // tp_size

    def problem(self) -> str:
        for name in ("heads", "key_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                return f"a linear attention layer's {name} must be at least 1, got {getattr(self, name)}"
        if self.heads % self.key_heads:
            return f"{self.heads} heads of values cannot share {self.key_heads} heads of keys evenly"
        return "" if self.conv_width >= 2 else f"a convolution's width must be at least 2, got {self.conv_width}"


@dataclass(frozen=True)
class PreparedHeads(Declared):
    """Norms and rotates the heads of queries and keys before a recurrence.

    mix(mixed): queries, keys and values of `num_heads` heads each, side by side -> the same, of which each query and
    each key is normed, then rotated to its token's position. mixed itself may be overwritten."""

    eager_reader = "headrace.executor.models.eager_states:EagerPreparedHeads"
    program_reader = "headrace.executor.cpu.recurrent:CpuPreparedHeads.read"

    num_heads: int
    """Heads of all ranks together."""
    head_dim: int
    rope: RopeSpec | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def weights(self) -> Iterator[Weight]:
        for each in (self.query_norm, self.key_norm):
            if each is not None:
                yield from each.weights()


@dataclass(frozen=True)
class LightningNames:
    """Names of a mixer's weights."""

    query: str = "in_q"
    key: str = "in_k"
    value: str = "in_v"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    gate: str = "output_gate"
    norm: str = "norm"
    output: str = "out_proj"


@dataclass(frozen=True)
class Lightning(StateMixer):
    """Lightning attention: keys and values are added as they are, and each head's states decay at a rate of its own; a
    norm of all heads as one row or in groups, and a gate. Names of weights are relative to `at`."""

    cpu_alone = ""

    heads: int = 0
    head_dim: int = 0
    rates: tuple[float, ...] = ()
    """Each head's rate of decay per token."""
    norm_eps: float = 1e-6
    at: str = "self_attn"
    names: LightningNames = LightningNames()
    activation: Literal["silu"] | None = "silu"
    """Of queries, keys and values."""
    head_norm_eps: float | None = None
    """eps of the norms of each query and key; None: they are not normed."""
    rope: RopeSpec | None = None
    scale: float = 1.0
    """Multiplies queries."""
    groups: int = 1
    """Parts of a row, of equal size, that are normed by themselves."""
    bias: bool = False
    """Whether the query, key and value projections have biases."""
    output_bias: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def _prepares(self) -> bool:
        return self.rope is not None or self.head_norm_eps is not None

    def fused(self) -> Fused:
        """How MiniMax's checkpoints store the projections, by head."""
        return Fused(
            f"{self.at}.qkv_proj", tuple((f"{self.at}.in_{name}", self.head_dim) for name in "qkv"), self.heads
        )

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (Kept("state", (self.heads // tp_size, self.head_dim, self.head_dim)),)

    def draft_elements(self, tp_size: int) -> int:
        return 3 * self.inner // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, names, hidden, inner = f"{self.at}.", self.names, spec.hidden_size, Axis(self.inner, unit=self.head_dim)
        mixed = tuple((at + name, inner) for name in (names.query, names.key, names.value))
        sizes = (self.heads, self.heads, self.head_dim, self.head_dim)
        found: dict[str, Declared] = {
            "mixed": Linear(mixed, hidden, self.bias, activation=self.activation),
            "gate": Linear(((at + names.gate, inner),), hidden),
            "attend": LinearAttention(*sizes, scale=self.scale, rates=self.rates, convolved=False),
            "norm": GatedNorm(at + names.norm, inner, self.inner // self.groups, self.norm_eps, "sigmoid"),
            "output": Linear(((at + names.output, hidden),), inner, self.output_bias),
        }
        if self._prepares:
            norms = (self._head_norm(at + name) for name in (names.query_norm, names.key_norm))
            found["prepare"] = PreparedHeads(self.heads, self.head_dim, self.rope, *norms)
        return found

    def _head_norm(self, name: str) -> Norm | None:
        if self.head_norm_eps is None:
            return None
        return Norm(name, self.head_dim, "rms", self.head_norm_eps, weight_offset=0.0, affine=True)

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        gate, mixed = ops.linear(held["gate"], x), ops.linear(held["mixed"], x)
        if self._prepares:
            mixed = ops.mix(held["prepare"], mixed)
        attended = ops.mix(held["attend"], mixed)
        return [ops.product(held["output"], ops.compute(held["norm"], attended, gate))]

    def for_ranks(self, tp_size: int, inner_block: int) -> Lightning:
        if self.heads % tp_size:
            raise ModelError(f"{self.heads} heads of lightning attention cannot be divided among {tp_size} ranks")
        if self.groups > 1 and self.groups % tp_size:
            raise ModelError(
                f"{self.groups} groups of heads that are normed together cannot be divided among {tp_size} ranks"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        """The projections and the recurrence's results, before and after the norm; op by op, prepared heads too."""
        return (6 + 3 * self._prepares) * self.inner // tp_size

    def problem(self) -> str:
        for name in ("heads", "head_dim", "groups"):
            if getattr(self, name) < 1:
                return f"lightning attention's {name} must be at least 1, got {getattr(self, name)}"
        if self.inner % self.groups:
            return f"{self.heads} heads of {self.head_dim} values cannot be normed in {self.groups} equal groups"
        if self.rope is not None and (self.rope.rotary_dim % 2 or not 2 <= self.rope.rotary_dim <= self.head_dim):
            return f"{self.rope.rotary_dim} rotary dimensions must be even and fit a head of {self.head_dim}"
        return "" if len(self.rates) == self.heads else f"{len(self.rates)} rates of decay for {self.heads} heads"

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        if self.groups == 1 and tp_size > 1:
            return "the program norms all heads as one row, and ranks have a part of it each."
        return ""
