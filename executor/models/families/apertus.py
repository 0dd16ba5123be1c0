"""Apertus: Llama's shape with normed queries and keys, and an FFN without a gate and with a learned activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Axis, Declared, Ffn, Held, Linear, Ops, Vector, rounded_up
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import biases, integer, llama_like

NAMES = WeightNames(
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    # Constants of the activation, the same in every checkpoint.
    ignorable=(*WeightNames.ignorable, r"\.act_fn\.(beta|eps)$"),
)
BETA, EPS = 0.5, -1e-6


@dataclass(frozen=True)
class LearnedActivation(Ffn):
    """down(xielu(up(x))). Each layer has its own two slopes as weights."""

    inner: int

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, inner = spec.names, Axis(self.inner)
        return {
            "up": Linear(((names.up, inner),), spec.hidden_size),
            "positive": Vector("mlp.act_fn.alpha_p", 1),
            "negative": Vector("mlp.act_fn.alpha_n", 1),
            "down": Linear(((names.down, spec.hidden_size),), inner),
        }

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        activated = ops.call(xielu, ops.linear(held["up"], x), held["positive"], held["negative"])
        return [ops.product(held["down"], activated)]

    def for_ranks(self, tp_size: int, inner_block: int) -> LearnedActivation:
        return self if tp_size == 1 else replace(self, inner=rounded_up(self.inner, tp_size * inner_block))

    def values_per_token(self, tp_size: int) -> int:
        """The activation's input and output, and three intermediates in float32, which count twice."""
        return 8 * self.inner // tp_size

    def problem(self) -> str:
        return "" if self.inner >= 1 else f"intermediate_size must be at least 1, got {self.inner}"

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program has no activation with slopes that are learned."


def xielu(x: Any, positive: Any, negative: Any) -> Any:
    """xIELU (Huang and Schlag 2024), in float32. x [num_tokens, inner]; positive, negative [1]: slopes before their
    softplus."""
    wide = x.float()
    above = positive.logaddexp(positive.new_zeros(1)) * wide * wide
    below = (wide.clamp(max=EPS).expm1() - wide) * (BETA + negative.logaddexp(negative.new_zeros(1)))
    return (above.where(wide > 0, below) + BETA * wide).to(x.dtype)


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
