"""RWKV-7's two mixers (Peng et al. 2025): each token's input is mixed with that of the token before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.executor.models.arch import ArchSpec, Kept
from headrace.executor.models.blocks import (
    Axis,
    Declared,
    Held,
    LayerOps,
    Linear,
    Norm,
    StateMixer,
    Vector,
    Weight,
    WithoutWeights,
)
from headrace.executor.models.blocks.tensor_ops import copied
from headrace.ipc.failure import ModelError

NO_PROGRAM = "the program has no op for RWKV-7's recurrence."


@dataclass(frozen=True)
class Shift(WithoutWeights, Declared):
    """mix(x): x of the token before each, zeros before the first."""

    eager_reader = "headrace.executor.models.eager_rwkv:EagerShift"

    channels: int


@dataclass(frozen=True)
class FirstValues(WithoutWeights, Declared):
    """mix(values): keeps the first layer's values for the later ones. mix(values, shares): values, and as much of those
    of the first layer as sigmoid(shares) says."""

    eager_reader = "headrace.executor.models.eager_rwkv:EagerFirstValues"


@dataclass(frozen=True)
class Wkv(Declared):
    """mix(receptance, decays, keys, values, rates): the recurrence of `kernels.reference.wkv`, a norm of each head, and
    what the token adds by itself. Reads and writes the sequences' states."""

    eager_reader = "headrace.executor.models.eager_rwkv:EagerWkv"

    heads: int
    head_dim: int
    first_draft_element: int
    norm_eps: float
    at: str

    def vectors(self) -> Mapping[str, Vector]:
        channels = Axis(self.heads * self.head_dim, unit=self.head_dim)
        names = {
            "removal": "k_k", "growth": "k_a", "norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias"
        }  # fmt: skip
        found = {key: Vector(f"{self.at}.{name}", channels) for key, name in names.items()}
        return found | {"own": Vector(f"{self.at}.r_k", channels, stored=(self.heads, self.head_dim))}

    def weights(self) -> Iterator[Weight]:
        for each in self.vectors().values():
            yield from each.weights()


@dataclass(frozen=True)
class Ranks:
    """Inner sizes of the products of two matrices."""

    decays: int
    values: int
    rates: int
    gate: int


@dataclass(frozen=True)
class TimeMix(StateMixer):
    """RWKV-7's attention, with the norm before it."""

    cpu_alone = "RWKV-7's recurrence"

    PARTS: ClassVar[Mapping[str, str]] = {
        "receptance": "x_r", "decays": "x_w", "keys": "x_k", "values": "x_v", "rates": "x_a", "gate": "x_g"
    }  # fmt: skip
    LOW: ClassVar[Mapping[str, str]] = {"decays": "w_lora", "values": "v_lora", "rates": "a_lora", "gate": "g_lora"}

    heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    ranks: Ranks = Ranks(0, 0, 0, 0)
    norm_eps: float = 1e-5
    is_first: bool = False
    """Whether it is the first layer, whose values the others read."""
    at: str = "attn"

    @property
    def follows(self) -> bool:
        return not self.is_first

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (
            Kept("history", (1, self.hidden)),
            Kept("state", (self.heads // tp_size, self.head_dim, self.head_dim)),
        )

    def draft_elements(self, tp_size: int) -> int:
        """The shift's inputs, then the recurrence's."""
        return self.hidden + 6 * self.inner // tp_size

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, hidden, channels = self.at, self.hidden, Axis(self.inner, unit=self.head_dim)
        found: dict[str, Declared] = {"norm": Norm.of(spec, f"{at}_norm", hidden), "shift": Shift(hidden)}
        for key, name in self.PARTS.items():
            found[f"mix_{key}"] = Vector(f"{at}.{name}", hidden, stored=(1, 1, None))
        for key, name in (("receptance", "r_proj"), ("keys", "k_proj"), ("values", "v_proj")):
            found[key] = Linear(((f"{at}.{name}", channels),), hidden)
        for key, name in self.LOW.items():
            if key == "values" and self.is_first:
                continue
            rank = getattr(self.ranks, key)
            found[f"{key}_down"] = Linear(((f"{at}.{name}.lora.0", rank),), hidden)
            found[f"{key}_up"] = Linear(((f"{at}.{name}.lora.2", channels),), rank, bias=key != "gate")
        found["first_values"] = FirstValues()
        found["wkv"] = Wkv(self.heads, self.head_dim, hidden, self.head_dim * self.norm_eps, at)
        found["output"] = Linear(((f"{at}.o_proj", hidden),), channels)
        return found

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        x = ops.norm(held["norm"], ops.call(copied, x))
        before = ops.mix(held["shift"], x)
        parts = {key: ops.call(_between, x, before, held[f"mix_{key}"]) for key in self.PARTS}

        def low(key: str, activation: Any = None) -> Any:
            inner = ops.linear(held[f"{key}_down"], parts[key])
            return ops.linear(held[f"{key}_up"], inner if activation is None else ops.call(activation, inner))

        values = ops.linear(held["values"], parts["values"])
        shares = () if self.is_first else (low("values"),)
        values = ops.mix(held["first_values"], values, *shares)
        receptance, keys = (ops.linear(held[key], parts[key]) for key in ("receptance", "keys"))
        mixed = ops.mix(held["wkv"], receptance, low("decays", _tanh), keys, values, low("rates"))
        return [ops.product(held["output"], ops.call(_times, mixed, low("gate", _sigmoid)))]

    def for_ranks(self, tp_size: int, inner_block: int) -> TimeMix:
        if self.heads % tp_size:
            raise ModelError(f"{self.heads} heads of RWKV cannot be divided among {tp_size} ranks")
        return self

    def values_per_token(self, tp_size: int) -> int:
        """The mixed inputs, projections, and the recurrence's inputs and result."""
        return 8 * self.hidden + 14 * self.inner // tp_size

    def problem(self) -> str:
        sizes = {
            "heads": self.heads,
            "head_dim": self.head_dim,
            **{f"{k}'s rank": v for k, v in vars(self.ranks).items()},
        }
        for name, size in sizes.items():
            if size < 1:
                return f"RWKV's {name} must be at least 1, got {size}"
        return ""

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return NO_PROGRAM


@dataclass(frozen=True)
class ChannelMix(StateMixer):
    """RWKV's FFN, which reads the token before too, with the norm before it."""

    inner: int = 0
    hidden: int = 0
    at: str = "ffn"

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (Kept("history", (1, self.hidden)),)

    def draft_elements(self, tp_size: int) -> int:
        return self.hidden

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        at, hidden, inner = self.at, self.hidden, Axis(self.inner)
        return {
            "norm": Norm.of(spec, f"{at}_norm", hidden),
            "shift": Shift(hidden),
            "mix": Vector(f"{at}.x_k", hidden),
            "up": Linear(((f"{at}.key", inner),), hidden, activation="relu2"),
            "down": Linear(((f"{at}.value", hidden),), inner),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        x = ops.norm(held["norm"], ops.call(copied, x))
        mixed = ops.call(_between, x, ops.mix(held["shift"], x), held["mix"])
        return [ops.product(held["down"], ops.linear(held["up"], mixed))]

    def for_ranks(self, tp_size: int, inner_block: int) -> ChannelMix:
        if self.inner % tp_size:
            raise ModelError(f"{self.inner} inner channels of RWKV cannot be divided among {tp_size} ranks")
        return self

    def values_per_token(self, tp_size: int) -> int:
        return 3 * self.hidden + 2 * self.inner // tp_size

    def problem(self) -> str:
        return "" if self.inner >= 1 else f"RWKV's inner size must be at least 1, got {self.inner}"

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return NO_PROGRAM


def _between(x: Any, before: Any, share: Any) -> Any:
    """x, and `share` of what the token before differs by"""
    return (x + (before - x) * share).to(x.dtype)


def _tanh(x: Any) -> Any:
    return x.float().tanh().to(x.dtype)


def _sigmoid(x: Any) -> Any:
    return x.float().sigmoid().to(x.dtype)


def _times(x: Any, y: Any) -> Any:
    return (x * y).to(y.dtype)
