"""OLMo Hybrid: gated delta networks, and OLMo 3's attention in every fourth layer."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.blocks.linear_attention import DeltaNames, DeltaRule
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    flag,
    head_dim_of,
    integer,
    llama_like,
    rope,
    rope_section,
)
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.qwen3_next import layer_kinds

DELTA = DeltaNames(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    rates="b_proj",
    decays="a_proj",
    gate="g_proj",
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    output="o_proj",
)
NORM_EPS = 1e-5
"""Of the gated norms, whatever that of the others."""


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    kinds = layer_kinds(config, lambda index: "full_attention" if index % 4 == 3 else "linear_attention")
    if config.get("layer_types") is None and "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    hidden, heads, head_dim = (
        integer(config, "hidden_size"),
        integer(config, "num_attention_heads"),
        head_dim_of(config),
    )
    key_heads = integer(config, "linear_num_key_heads", heads)
    key_dim = integer(config, "linear_key_head_dim", int(0.75 * hidden / max(1, key_heads)))
    mixer = DeltaRule(
        heads=integer(config, "linear_num_value_heads", heads),
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=integer(config, "linear_value_head_dim", 2 * key_dim),
        conv_width=integer(config, "linear_conv_kernel_dim", 4),
        norm_eps=NORM_EPS,
        correction=2.0 if flag(config, "linear_allow_neg_eigval", True) else 1.0,
        names=DELTA,
    )
    # A base that is null is no rotation, as published models have it; one that is left out is transformers' default.
    bases = [each["rope_theta"] for each in (rope_section(config), config) if "rope_theta" in each]
    rotates = not bases or bases[0] is not None
    renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    spec = llama_like(
        config,
        positions=[Positions(rope(config, head_dim, 10000.0) if rotates else None)] * len(kinds),
        head_dim=head_dim,
        attention={"qk_norm": "whole", **biases(config, "attention_bias", False)},
        default_context=65536,
        fused=tuple(Fused(stored, ((name, hidden),)) for stored, name in renamed.items()),
    )
    layers = [
        replace(layer, norm_placement="output") if kind == "full_attention" else replace(layer, mixer=mixer)
        for kind, layer in zip(kinds, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


_TRAINING = ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
FAMILY = Family(("OlmoHybridForCausalLM",), build, ignored=dict.fromkeys(_TRAINING, "training alone"))
