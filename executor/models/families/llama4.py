"""Llama 4: every fourth layer without rotation, rotated queries and keys normed, and one expert of a token beside one
that all go to, whose input and not whose result is weighted. Text only.

Beyond 8,191 tokens rotated layers attend within chunks and the others scale their queries by position, which is not
supported: the longest context ends before (`_longest`). A multimodal checkpoint serves its language
model; the vision tower is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Attend, Declared, Ffn, Held, Ops, Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import activation, biases, flag, head_dim_of, integer, llama_like, rope
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("model.", "language_model.model.", "model.language_model."),
    lm_heads=("lm_head", "language_model.lm_head"),
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    experts="feed_forward.experts",
    shared_expert="feed_forward.shared_expert",
    ignorable=(*WeightNames.ignorable, r"(^|\.)vision_(model|tower)\.", r"(^|\.)multi_modal_projector\."),
)
STACKED = StackedExperts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", transposed=True)
ONE_WHOLE = Routing(1, "softmax", renormalise=True)
"""The best expert of each token, weighted by 1."""


@dataclass(frozen=True)
class UnitNormAttention(Attention):
    """Each head's query and key are normed without weights. That rotation turns pairs and leaves lengths as they are,
    so it may come before or after."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        attend = found["attend"]
        assert isinstance(attend, Attend)
        if attend.query_norm is None or attend.key_norm is None:
            return found
        query_norm, key_norm = (replace(norm, affine=False) for norm in (attend.query_norm, attend.key_norm))
        return found | {"attend": replace(attend, query_norm=query_norm, key_norm=key_norm)}

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program norms queries and keys by RMS norms with weights alone." if self.qk_norm != "no" else ""


@dataclass(frozen=True)
class InputScaledExperts(Experts):
    """The best expert's input is scaled by the sigmoid of its logit."""

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        logits = ops.linear(held["router"], x)
        scaled = ops.call(_scaled, x, logits)
        shared = ops.product(held["shared_down"], ops.linear(held["shared_up"], x))
        return [ops.experts(held["experts"], scaled, logits, self.routing), shared]

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program weights what experts make, and here what they are given is weighted."


def _scaled(x: Any, logits: Any) -> Any:
    """x [num_tokens, hidden], logits [num_tokens, num_experts] -> [num_tokens, hidden]"""
    return x * logits.amax(-1, keepdim=True).float().sigmoid().to(x.dtype)


def build(config: Config) -> ArchSpec:
    text: dict[str, Any] = {**(config.get("text_config") or config), "architectures": config["architectures"]}
    num_layers, head_dim = integer(text, "num_hidden_layers"), head_dim_of(text)
    if integer(text, "num_experts_per_tok", 1) != 1:
        raise NotNativeError("a Llama 4 with more than one expert of a token is not supported")
    rotary = replace(rope(text, head_dim, 500000.0), interleaved=True)
    spec = llama_like(
        text,
        head_dim=head_dim,
        ffn=_ffns(text, num_layers),
        max_positions=_longest(text),
        names=NAMES,
        stacked=STACKED,
    )
    plain = spec.layers[0].mixer
    assert isinstance(plain, Attention)
    fields = {name: getattr(plain, name) for name in ("num_heads", "num_kv_heads", "head_dim", "scale")}
    fields |= biases(text, "attention_bias", False)
    norm: Literal["head", "no"] = "head" if flag(text, "use_qk_norm", True) else "no"
    rotated, other = UnitNormAttention(**fields, rope=rotary, qk_norm=norm), Attention(**fields, rope=None)
    layers = zip(spec.layers, _rotates(text, num_layers), strict=True)
    return replace(spec, layers=tuple(replace(layer, mixer=rotated if turns else other) for layer, turns in layers))


def _rotates(config: Config, num_layers: int) -> list[bool]:
    """Of each layer."""
    interval = integer(config, "no_rope_layer_interval", 4)
    found = config.get("no_rope_layers") or [(index + 1) % max(1, interval) != 0 for index in range(num_layers)]
    if not isinstance(found, list) or len(found) < num_layers:
        raise ModelError(f"the config's no_rope_layers must list all {num_layers} layers, got {found!r}")
    return [bool(each) for each in found[:num_layers]]


def _ffns(config: Config, num_layers: int) -> Callable[[int], Ffn]:
    kind, inner = activation(config, "hidden_act", "silu"), integer(config, "intermediate_size")
    mixture = InputScaledExperts(
        integer(config, "num_local_experts"), ONE_WHOLE, inner, kind, shared_inner=inner, shared_gate=False
    )
    step = max(1, integer(config, "interleave_moe_layer_step", 1))
    mixed = config.get("moe_layers")
    mixed = range(step - 1, num_layers, step) if mixed is None else mixed
    if not isinstance(mixed, list | range):
        raise ModelError(f"the config's moe_layers must be a list of layers, got {mixed!r}")
    if len(mixed) == num_layers:
        return lambda _: mixture
    dense = Dense(integer(config, "intermediate_size_mlp"), kind)
    return lambda index: mixture if index in mixed else dense


def _longest(config: Config) -> int:
    """The longest context in which nothing is chunked, nor a query scaled."""
    longest = integer(config, "max_position_embeddings", 131072)
    longest = min(longest, integer(config, "attention_chunk_size", longest))
    if flag(config, "attn_temperature_tuning", True):
        longest = min(longest, integer(config, "floor_scale", 8192) - 1)
    return longest


FAMILY = Family(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), build)
