"""Kimi Linear: Kimi Delta Attention, latent attention without rotation in every fourth layer, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec, Fused, LayerSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.linear_attention import DeltaNames, DeltaRule
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    activation,
    corrected_routing,
    dense,
    integer,
    number,
    routed_layers,
)
from headrace.executor.models.families._latent import latent_like
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.qwen3_next import layer_kinds
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    router="block_sparse_moe.gate",
    router_correction="block_sparse_moe.gate.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    shared_expert="block_sparse_moe.shared_experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    # As transformers' modules are called, whose own files have the publisher's names.
    renamed=(
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.mlp\.(gate|shared_experts)\.", r".block_sparse_moe.\1."),
    ),
)
DELTA = DeltaNames(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    rates="b_proj",
    decays="f_b_proj",
    decays_down="f_a_proj",
    gate="g_b_proj",
    gate_down="g_a_proj",
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    output="o_proj",
)
COMMON = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""From the names that transformers gives fields to those of the published config."""


def _kinds(config: Config, linear: Config) -> list[str]:
    """Each layer's kind: by `linear_attn_config`, whose layers count from 1, else as `layer_kinds` gives it."""
    count, places = integer(config, "num_hidden_layers"), dict[int, str]()
    for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
        given = linear.get(key) or []
        if not isinstance(given, list) or not all(type(each) is int and 1 <= each <= count for each in given):
            raise ModelError(f"the config's {key} must list layers from 1 to {count}, got {given!r:.80}")
        places |= dict.fromkeys(given, kind)
    kinds = layer_kinds(config, lambda index: "linear_attention" if index % 4 or not index else "full_attention")
    if not places:
        return kinds
    if len(places) != count:
        raise ModelError(f"the config's linear_attn_config names {len(places)} of {count} layers")
    listed = [places[index + 1] for index in range(count)]
    if config.get("layer_types") is not None and kinds != listed:
        raise ModelError("the config's layer_types and linear_attn_config contradict each other")
    return listed


def size_of_linear(config: Config, linear: Config, key: str, own: str, default: int) -> int:
    """A size of the linear layers, from `linear_attn_config` or beside it; transformers writes both. Raises
    ModelError."""
    beside = integer(config, own, default)
    size = integer(linear, key, beside)
    if config.get(own) is not None and size != beside:
        raise ModelError(f"the config's {own} is {beside} and its linear_attn_config's {key} {size}; it is one field")
    return size


class _SharedUnderOtherNames(Experts):
    """Experts whose shared one has the names of a dense FFN."""

    def declare(self, spec: ArchSpec) -> Any:
        found = dict(super().declare(spec))
        plain = replace(
            spec, names=replace(spec.names, expert_gate="gate_proj", expert_up="up_proj", expert_down="down_proj")
        )
        return found | {key: each for key, each in super().declare(plain).items() if key.startswith("shared")}


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    config = config.renamed(**COMMON)
    linear = config.section("linear_attn_config")
    kinds = _kinds(config, linear)
    size = size_of_linear(config, linear, "head_dim", "linear_head_dim", 128)
    delta = DeltaRule(
        heads=(heads := size_of_linear(config, linear, "num_heads", "linear_num_heads", 32)),
        key_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_width=size_of_linear(config, linear, "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
        decay_per_channel=True,
        rank=size,
        gate="sigmoid",
        at="self_attn",
        names=DELTA,
        decay_shape=(1, 1, None, 1),
    )
    inner = integer(config, "moe_intermediate_size", 1024)
    mixture = _SharedUnderOtherNames(
        integer(config, "num_local_experts", 256),
        corrected_routing(config),
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * integer(config, "n_shared_experts", 1),
        shared_gate=False,
        correction="vector",
    )
    routes = routed_layers(config, 1)

    def ffn(index: int) -> Ffn:
        return mixture if routes[index] else dense(config)

    spec = latent_like(
        config | {"rope_interleave": False, "rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0},
        ffn,
        names=NAMES,
        max_positions=integer(config, "max_position_embeddings", 1048576),
        stacked=STACKED,
        fused=_dense_names(config),
    )
    layers = []
    for kind, layer in zip(kinds, spec.layers, strict=True):
        full = layer.mixer
        assert isinstance(full, LatentAttention)
        plain = replace(full, rope=RopeSpec(10000.0, full.rope_dim, "none"))
        layers.append(LayerSpec(plain if kind == "full_attention" else delta, layer.ffn))
    return replace(spec, layers=tuple(layers))


def _dense_names(config: Config) -> tuple[Fused, ...]:
    """transformers saves dense FFNs under the names of the others."""
    inner, hidden = integer(config, "intermediate_size"), integer(config, "hidden_size")
    sizes = {NAMES.gate: inner, NAMES.up: inner, NAMES.down: hidden}
    return tuple(Fused(name.replace("mlp", "block_sparse_moe"), ((name, size),)) for name, size in sizes.items())


FAMILY = Family(
    ("KimiLinearForCausalLM",),
    build,
    ignored={
        "is_moe": "num_experts says it",
        "rope_theta": "nothing is rotated",
        "rope_parameters": "nothing is rotated",
        "num_key_value_heads": "latent attention has one",
        "use_grouped_topk": "the number of groups says it",
    },
    assumes={"mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",)},
)
