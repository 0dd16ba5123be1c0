"""Laguna: sliding windows, query heads of each layer's own number, heads gated by softplus, and mixtures after dense
layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    activation,
    dense,
    flag,
    integer,
    layer_types,
    llama_like,
    number,
    require_whole_sections,
    rope,
    rope_section,
    routed_layers,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    query_gate="self_attn.g_proj",
    router_correction="mlp.experts.e_score_correction_bias",
    # As transformers' modules are called, whose own files have the publisher's names.
    renamed=(
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.experts.e_score_correction_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    ),
)
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""Of a config that says nothing of rotations."""
OF_HEADS, OF_COLUMNS = (True, "per-head"), "per-element"
"""Values of `gating`: one gate for each head, and one for each column of its results."""


def build(config: Config) -> ArchSpec:
    count, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim", 128)
    kinds = layer_types(config, count, ["full_attention"] * count)
    if "sliding_attention" not in kinds:
        config.pass_over("sliding_window")
    heads, sparse = _heads(config, count), routed_layers(config, default_dense=1)
    if not any(sparse):
        config.pass_over("num_experts", "shared_expert_intermediate_size", "moe_")
    require_whole_sections(config, list(dict.fromkeys(kinds)), "rope_theta")
    ropes = {kind: _rope(config, kind, head_dim) for kind in dict.fromkeys(kinds)}
    mixers = [_attention(config, ropes[kind], kind, own, head_dim) for kind, own in zip(kinds, heads, strict=True)]
    spec = llama_like(
        config | {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
        head_dim=head_dim,
        ffn=lambda index: _mixture(config) if sparse[index] else dense(config),
        default_context=131_072,
        names=NAMES,
    )
    layers = (replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True))
    return replace(spec, layers=tuple(layers))


def _heads(config: Config, count: int) -> list[int]:
    """Query heads of each layer. Raises ModelError."""
    given = config.get("num_attention_heads_per_layer")
    if given is None:
        return [integer(config, "num_attention_heads")] * count
    if not isinstance(given, list) or len(given) != count or not all(type(each) is int for each in given):
        raise ModelError(
            f"the config's num_attention_heads_per_layer must have a whole number for each of {count} layers, got "
            f"{given!r:.80}"
        )
    return [integer(Config({"num_attention_heads": each}), "num_attention_heads") for each in given]


def _rope(config: Config, kind: str, head_dim: int) -> RopeSpec:
    """Of layers of a kind. What its section has counts, whatever stands beside the sections."""
    config = config if kind in rope_section(config) else config | {"rope_parameters": ROPES, "rope_scaling": None}
    beside = [key for key in ("rope_theta", "partial_rotary_factor") if rope_section(config).section(kind).get(key)]
    config.pass_over(*beside)
    return rope(config | dict.fromkeys(beside), head_dim, 10_000.0, kind)


def _attention(config: Config, rotation: RopeSpec, kind: str, heads: int, head_dim: int) -> Attention:
    bias, slides = flag(config, "attention_bias", False), kind == "sliding_attention"
    return Attention(
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rotation,
        sliding_window=integer(config, "sliding_window", 512) if slides else None,
        bias=bias,
        output_bias=bias,
        qk_norm="head",
        **_gates(config),
    )


def _gates(config: Config) -> dict[str, Any]:
    """Fields of attention. Raises ModelError."""
    gating = True if config.get("gating") is None else config["gating"]
    if gating == OF_COLUMNS:
        return {"gated": True, "gate_activation": "softplus", "gate_bias": False}
    if not any(gating is each or (gating == each and isinstance(gating, str)) for each in OF_HEADS):
        raise ModelError(f"the config's gating is {gating!r:.80}; supported are true, per-head and per-element")
    return {"head_gate": True, "gate_activation": "softplus"}


def _mixture(config: Config) -> Ffn:
    routing = Routing(
        integer(config, "num_experts_per_tok", 8),
        "sigmoid",
        renormalise=True,
        scale=number(config, "moe_routed_scaling_factor", 1.0),
    )
    return Experts(
        integer(config, "num_experts", 256),
        routing,
        integer(config, "moe_intermediate_size", 512),
        activation(config, "hidden_act", "silu"),
        shared_inner=integer(config, "shared_expert_intermediate_size", 512),
        shared_gate=False,
        correction="vector",
        logit_cap=number(config, "moe_router_logit_softcapping", 0.0) or None,
    )


FAMILY = Family(
    ("LagunaForCausalLM",),
    build,
    assumes={
        "moe_apply_router_weight_on_input": (False,),
        "swa_attention_sink_enabled": (False,),
        "swa_rope_parameters": (),
    },
)
