"""Llama 4: no rotation in every fourth layer, normed queries and keys in the others, and per token one routed expert,
whose input (not its result) is weighted, beside a shared one. Text only.

Layers with rotation attend within chunks of 8,192 tokens; in the others, queries are scaled up from position 8,191 on.
Of a multimodal checkpoint only the language model is read, not the vision tower.
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
from headrace.executor.models.families._config import (
    activation,
    biases,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    rope,
    rotated_layers,
    text_part,
)
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
"""Routing to each token's best expert, with weight 1."""


@dataclass(frozen=True)
class LongAttention(Attention):
    """Attention within chunks, or with queries scaled by their positions. With qk_norm, each head's query and key are
    normed without weights. Llama 4 does so after the rotation and `Attend` before it, which is the same: rotation does
    not change lengths."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        attend = found["attend"]
        assert isinstance(attend, Attend)
        if attend.query_norm is not None and attend.key_norm is not None:
            query_norm, key_norm = (replace(norm, affine=False) for norm in (attend.query_norm, attend.key_norm))
            attend = replace(attend, query_norm=query_norm, key_norm=key_norm)
        return found | {"attend": attend}

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program has no norms without weights."


@dataclass(frozen=True)
class InputScaledExperts(Experts):
    """Experts whose input, not their result, is scaled by the sigmoid of the best expert's logit."""

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
    text = text_part(config)
    num_layers, head_dim = integer(text, "num_hidden_layers"), head_dim_of(text)
    if integer(text, "num_experts_per_tok", 1) != 1:
        raise NotNativeError("a Llama 4 with more than one expert of a token is not supported")
    rotary = replace(rope(text, head_dim, 500000.0), interleaved=True)
    spec = llama_like(
        text,
        head_dim=head_dim,
        ffn=_ffns(text, num_layers),
        default_context=131072,
        names=NAMES,
        stacked=STACKED,
    )
    plain = spec.layers[0].mixer
    assert isinstance(plain, Attention)
    fields = {name: getattr(plain, name) for name in ("num_heads", "num_kv_heads", "head_dim", "scale")}
    fields |= biases(text, "attention_bias", False)
    norm: Literal["head", "no"] = "head" if flag(text, "use_qk_norm", True) else "no"
    chunk_size = integer(text, "attention_chunk_size", 8192)
    growth = (integer(text, "floor_scale", 8192), number(text, "attn_scale", 0.1), 1)
    grows = flag(text, "attn_temperature_tuning", True)
    rotates = _rotates(text, num_layers)
    mixers = [
        LongAttention(**fields, rope=rotary, qk_norm=norm, chunk_size=chunk_size if chunked else None)
        if turns
        else LongAttention(
            **fields,
            rope=None,
            chunk_size=chunk_size if chunked else None,
            query_growth=growth if grows else None,
        )
        for turns, chunked in zip(rotates, _chunked(text, rotates), strict=True)
    ]
    layers = zip(spec.layers, mixers, strict=True)
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in layers))


def _chunked(config: Config, rotates: Sequence[bool]) -> list[bool]:
    """Whether each layer attends within chunks: by the config's layer_types, else if the layer has rotation."""
    types = config.get("layer_types")
    if types is None:
        return list(rotates)
    if not isinstance(types, list) or len(types) < len(rotates):
        raise ModelError(f"the config's layer_types must list all {len(rotates)} layers, got {types!r}")
    if unknown := sorted(set(map(str, types)) - {"full_attention", "chunked_attention"}):
        raise ModelError(f"layer types {', '.join(unknown)} are not those of a Llama 4")
    return [kind == "chunked_attention" for kind in types[: len(rotates)]]


def _rotates(config: Config, num_layers: int) -> list[bool]:
    """Whether each layer has rotary positions."""
    interval = integer(config, "no_rope_layer_interval", 4)
    return rotated_layers(config, [(index + 1) % max(1, interval) != 0 for index in range(num_layers)])


def _ffns(config: Config, num_layers: int) -> Callable[[int], Ffn]:
    kind, inner = activation(config, "hidden_act", "silu"), integer(config, "intermediate_size")
    mixture = InputScaledExperts(
        integer(config, "num_local_experts"), ONE_WHOLE, inner, kind, shared_inner=inner, shared_gate=False
    )
    step = max(1, integer(config, "interleave_moe_layer_step", 1))
    mixed = config.get("moe_layers")
    mixed = range(step - 1, num_layers, step) if mixed is None else mixed
    if not isinstance(mixed, list | range) or not set(mixed) <= set(range(num_layers)):
        raise ModelError(f"the config's moe_layers must be a list of layers from 0 to {num_layers - 1}, got {mixed!r}")
    if len(set(mixed)) == num_layers:
        return lambda _: mixture
    dense = Dense(integer(config, "intermediate_size_mlp"), kind)
    return lambda index: mixture if index in mixed else dense


FAMILY = Family(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), build)
