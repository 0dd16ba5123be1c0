"""Apertus: Llama's shape with normed queries and keys, and an FFN without a gate and with a learned activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Axis, Declared, Ffn, Held, Linear, Ops, Vector, Weight, rounded_up
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import biases, integer, llama_like

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.executor.cpu.program import ProgramOps
    from headrace.executor.models.reading import CheckedWeights
    from headrace.kernels.cpu.facade import Buffer

NAMES = WeightNames(
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    # Constants of the activation, the same in every checkpoint.
    ignorable=(*WeightNames.ignorable, r"\.act_fn\.(beta|eps)$"),
)
BETA, EPS = 0.5, -1e-6


@dataclass(frozen=True)
class Xielu(Declared):
    """compute(x): xIELU (Huang and Schlag 2024) in float32, with a layer's two slopes, which are learned."""

    eager_reader = "headrace.executor.models.families.apertus:EagerXielu"
    program_reader = "headrace.executor.models.families.apertus:CpuXielu"

    positive: Vector
    """Before its softplus; negative likewise."""
    negative: Vector

    def weights(self) -> Iterator[Weight]:
        yield from self.positive.weights()
        yield from self.negative.weights()


class EagerXielu:
    """An `Xielu` with its factors, of x^2 above 0 and of e^x - 1 - x below it."""

    def __init__(self, weights: CheckedWeights, declared: Xielu, prefix: str) -> None:
        positive, negative = (weights.values(each, prefix) for each in (declared.positive, declared.negative))
        zero = positive.new_zeros(1)
        self.above, self.below = positive.logaddexp(zero), BETA + negative.logaddexp(zero)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        below = (wide.clamp(max=EPS).expm1() - wide) * self.below
        return ((self.above * wide * wide).where(wide > 0, below) + BETA * wide).to(x.dtype)


class CpuXielu(EagerXielu):
    """The same as an op of a program."""

    def write(self, ops: ProgramOps, x: Buffer) -> Buffer:
        out = ops.room(x.columns, ops.inner)
        ops.builder.xielu(x, out, above=float(self.above), below=float(self.below), linear=BETA, most=EPS)
        return out


@dataclass(frozen=True)
class LearnedActivation(Ffn):
    """down(xielu(up(x)))"""

    inner: int

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, inner = spec.names, Axis(self.inner)
        return {
            "up": Linear(((names.up, inner),), spec.hidden_size),
            "activation": Xielu(Vector("mlp.act_fn.alpha_p", 1), Vector("mlp.act_fn.alpha_n", 1)),
            "down": Linear(((names.down, spec.hidden_size),), inner),
        }

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        return [ops.product(held["down"], ops.compute(held["activation"], ops.linear(held["up"], x)))]

    def for_ranks(self, tp_size: int, inner_block: int) -> LearnedActivation:
        return self if tp_size == 1 else replace(self, inner=rounded_up(self.inner, tp_size * inner_block))

    def values_per_token(self, tp_size: int) -> int:
        """The activation's input and output, and three intermediates in float32, which count twice."""
        return 8 * self.inner // tp_size

    def problem(self) -> str:
        return "" if self.inner >= 1 else f"intermediate_size must be at least 1, got {self.inner}"


def build(config: Config) -> ArchSpec:
    if (kind := config.get("hidden_act") or "xielu") != "xielu":
        raise NotNativeError(f"the config's hidden_act is {kind!r}; of an Apertus only xielu is supported")
    return llama_like(
        config,
        attention={"qk_norm": "head", **biases(config, "attention_bias", False)},
        ffn=LearnedActivation(integer(config, "intermediate_size")),
        default_context=65536,
        names=NAMES,
    )


FAMILY = Family(("ApertusForCausalLM",), build, assumes={"post_norm": (False,), "qk_norm": (True,)})
