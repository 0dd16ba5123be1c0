"""Step 3.5 and the language model of Step 3.7: sliding windows with heads of their own number, a gate per head, and
mixtures after dense layers, in the last of which activations have a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, NormSpec, RopeSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Activation, Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    flag,
    integer,
    layer_configs,
    layer_types,
    listed_layers,
    llama_like,
    number,
    optional_integer,
    rope,
    rope_section,
    text_part,
)
from headrace.executor.models.families.text_halves import OTHER_MEDIA
from headrace.ipc.failure import ModelError

TEXT, MULTIMODAL = "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"
NAMES = WeightNames(
    prefixes=("model.", "model.language_model.", "language_model.model.", ""),
    query_gate="self_attn.g_proj",
    router="moe.gate",
    experts="moe.experts",
    router_correction="moe.router_bias",
    shared_expert="share_expert",
)
LIMITED: Mapping[float, Activation] = {0.0: "silu", 7.0: "silu_to_7", 16.0: "silu_to_16"}
OTHER_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
    "routed_scaling_factor": "moe_router_scaling_factor",
    "norm_topk_prob": "norm_expert_weight",
}


def build(config: Config) -> ArchSpec:
    config = text_part(config).renamed(**OTHER_NAMES)
    count, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim", 128)
    kinds, sparse = layer_types(config, count, ["full_attention"] * count), _sparse_layers(config, count)
    own = layer_configs(config, count, "num_attention_heads")
    mixers = [_attention(own[i], i, kind, head_dim) for i, kind in enumerate(kinds)]
    spec = llama_like(
        config | {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
        head_dim=head_dim,
        ffn=lambda index: _mixture(config, index) if sparse[index] else _dense(config, index),
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-5), weight_offset=1.0),
        stacked=StackedExperts("moe.gate_proj.weight", "moe.down_proj.weight", up="moe.up_proj.weight"),
    )
    further = integer(config, "num_nextn_predict_layers", 0)
    drafting = tuple(rf"(^|\.)layers\.{count + index}\." for index in range(further))
    names = replace(NAMES, ignorable=(*NAMES.ignorable, *OTHER_MEDIA, r"^(model\.)?vit_large_projector\.", *drafting))
    layers = (replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True))
    return replace(spec, layers=tuple(layers), names=names)


def _attention(config: Config, index: int, kind: str, head_dim: int) -> Attention:
    slides = kind == "sliding_attention"
    heads, sliding = integer(config, "num_attention_heads"), optional_integer(config, "num_sliding_attention_heads")
    others = config.section("attention_other_setting")
    if slides and not config.section("per_layer_config"):
        heads = sliding or integer(others, "num_attention_heads", heads)
    kv_heads = integer(config, "num_key_value_heads", 8)
    for key, value in (("num_attention_groups", kv_heads), ("head_dim", head_dim), ("true_head_dim", head_dim)):
        if integer(others, key, value) != value:
            raise NotNativeError(f"the config's attention_other_setting has another {key}, which is not supported")
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=number(config, "query_pre_attn_scalar", head_dim) ** -0.5,
        rope=_rope(config, index, kind, head_dim),
        sliding_window=integer(config, "sliding_window") if slides else None,
        bias=flag(config, "attention_bias", False),
        output_bias=flag(config, "attention_bias", False),
        qk_norm="head",
        head_gate=flag(config, "use_head_wise_attn_gate", True),
    )


def _rope(config: Config, index: int, kind: str, head_dim: int) -> RopeSpec:
    """A layer's rotation, which configs give by kind of layer, or as one number or one for each layer."""
    if kind in rope_section(config):
        return rope(config, head_dim, 10_000.0, kind)
    own: dict[str, Any] = {
        "rope_theta": _of_layer(config, "rope_theta", index, 10_000.0),
        "partial_rotary_factor": _of_layer(config, "partial_rotary_factors", index, 1.0),
    }
    scaled = config.get("yarn_only_types") or ["full_attention"]
    if kind not in scaled:
        own |= {"rope_scaling": None, "rope_parameters": None}
    return rope(config | own, head_dim, 10_000.0)


def _of_layer(config: Config, key: str, index: int, default: float) -> float:
    """A number of this layer: of a list, or the one that all layers have. Raises ModelError."""
    given = config.get(key)
    if not isinstance(given, list):
        return number(config, key, default)
    if index >= len(given):
        raise ModelError(f"the config's {key} has {len(given)} entries, and none for layer {index}")
    return default if given[index] is None else number(Config({key: given[index]}), key)


def _sparse_layers(config: Config, count: int) -> list[bool]:
    """Whether each layer has experts. Raises ModelError."""
    given = config.get("mlp_layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {"dense", "sparse"}:
            raise ModelError(f"the config's mlp_layer_types must list dense or sparse per layer, got {given!r:.80}")
        return [each == "sparse" for each in given[:count]]
    found = listed_layers(config, "moe_layers_enum", range(3, count))
    return [index in found for index in range(count)]


def _activation(config: Config, key: str, index: int) -> Activation:
    limit = _of_layer(config, key, index, 0.0) if config.get(key) else 0.0
    if limit not in LIMITED:
        raise NotNativeError(f"the config's {key} has {limit:g}; activations can have a limit of 7 or of 16")
    return LIMITED[limit]


def _dense(config: Config, index: int) -> Ffn:
    kind = _activation(config, "swiglu_limits_shared", index)
    return Dense(integer(config, "intermediate_size"), kind, bias=flag(config, "mlp_bias", False))


def _mixture(config: Config, index: int) -> Ffn:
    routing = Routing(
        integer(config, "num_experts_per_tok", 8),
        "sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    return Experts(
        integer(config, "n_routed_experts"),
        routing,
        integer(config, "moe_intermediate_size"),
        _activation(config, "swiglu_limits", index),
        shared_inner=integer(config, "share_expert_dim", 1280),
        shared_activation=_activation(config, "swiglu_limits_shared", index),
        shared_gate=False,
        correction="vector",
    )


FAMILY = Family(
    (TEXT, MULTIMODAL),
    build,
    ignored={
        "mtp_layer_types": "of further layers, which are not run",
        "mtp_mlp_layer_types": "of further layers, which are not run",
        "num_nextn_predict_layers": "of further layers, which are not run",
        "need_fp32_gate": "routers are computed in float32",
        "projector_bias": "of images",
        "understand_projector_stride": "of images",
        "attention_type": "the layers' types say it",
    },
    assumes={
        "att_impl_type": ("GQA",),
        "gating": (True, "per-head"),
        "hidden_act": ("silu",),
        "moe_every_n_layer": (1,),
        "moe_router_activation": ("sigmoid",),
        "use_bidirectional_attention": (False,),
        "use_moe": (True,),
        "use_moe_router_bias": (True,),
        "use_qk_norm": (True,),
        "use_rope_layers": ([],),
        "zero_centered": (True,),
    },
)
