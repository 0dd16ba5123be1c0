"""Ling and Ring 2.5: lightning attention with normed and rotated heads, latent attention in the last layer of each
group, and Ling 2's experts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, RopeSpec, WeightNames
from headrace.executor.models.blocks.linear_attention import Lightning, LightningNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    alibi_slopes,
    corrected_routing,
    flag,
    head_dim_of,
    integer,
    mixture_after_dense,
    number,
    rope,
    with_rotary_dim,
)
from headrace.executor.models.families._latent import latent_like
from headrace.executor.models.families.bailing_moe import (
    ASSUMES,
    AT,
    IGNORED,
    ignorable_layers,
    shared_inner,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    embedding="word_embeddings",
    query=f"{AT}.q_proj",
    query_down=f"{AT}.q_a_proj",
    query_down_norm=f"{AT}.q_a_layernorm",
    query_up=f"{AT}.q_b_proj",
    latent_down=f"{AT}.kv_a_proj_with_mqa",
    latent_norm=f"{AT}.kv_a_layernorm",
    latent_up=f"{AT}.kv_b_proj",
    output=f"{AT}.dense",
    router_correction="mlp.gate.expert_bias",
    shared_expert="mlp.shared_experts",
)
LIGHTNING = LightningNames(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    query_norm="query_layernorm",
    key_norm="key_layernorm",
    gate="g_proj",
    norm="g_norm",
    output="dense",
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **{"n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1},
        **{"head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        **{"rope_theta": 600_000.0, "partial_rotary_factor": 0.5, "max_position_embeddings": 32_768},
    }
)
"""What the class of the published configs has for fields that a file leaves out."""


def slopes(heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Each head's rate of decay in a layer: ALiBi's slopes, which fall from layer to layer. As vLLM counts layers; the
    code beside the checkpoints has the factor of the layer before."""
    return alibi_slopes(heads, 1 - layer / max(1, num_layers - 1) + 1e-5)


def build(config: Config) -> ArchSpec:
    own = config.renamed(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts", attention_bias="use_qkv_bias"
    )
    config = DEFAULTS | own
    head_dim, heads = head_dim_of(config), integer(config, "num_attention_heads")
    count, period = integer(config, "num_hidden_layers"), integer(config, "layer_group_size", 5)
    if period < 1:
        raise ModelError(f"the config's layer_group_size must be at least 1, got {period}")
    spec = latent_like(
        config,
        mixture_after_dense(
            config, corrected_routing(config), shared_inner=shared_inner(config, config["architectures"][0])
        ),
        names=replace(NAMES, ignorable=(*NAMES.ignorable, r"^model\.mtp", *ignorable_layers(config))),
        fused=(Fused(f"{AT}.query_key_value", tuple((f"{AT}.{each}_proj", heads * head_dim) for each in "qkv")),),
    )
    rotary = _linear_rope(config, head_dim)
    eps = number(config, "rms_norm_eps", 1e-6)
    linear = Lightning(
        heads=heads,
        head_dim=head_dim,
        norm_eps=eps,
        at=AT,
        names=LIGHTNING,
        activation="silu" if _has_silu(config) else None,
        head_norm_eps=eps if flag(config, "use_qk_norm", True) else None,
        rope=rotary,
        scale=head_dim**-0.5,
        groups=integer(config, "group_norm_size", 4),
        bias=flag(config, "attention_bias", False),
        output_bias=flag(config, "use_bias", False),
    )
    # The layers after the last whole group have latent attention, too.
    layers = tuple(
        layer
        if (index + 1) % period == 0 or index >= count // period * period
        else replace(layer, mixer=replace(linear, rates=slopes(heads, index, count)))
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def _linear_rope(config: Config, head_dim: int) -> RopeSpec | None:
    """The rotation of lightning attention; None: there is none. Latent attention rotates all its rotary dimensions."""
    found = rope(with_rotary_dim(config, head_dim), head_dim, DEFAULTS["rope_theta"])
    return found if flag(config, "linear_rope", True) else None


def _has_silu(config: Config) -> bool:
    """Whether lightning attention's queries, keys and values are activated."""
    default = flag(config, "linear_silu", False)
    return flag(config, "use_linear_silu", default)


FAMILY = Family(
    ("BailingMoeV2_5ForCausalLM",),
    build,
    ignored=IGNORED,
    assumes={**ASSUMES, "scoring_func": ("sigmoid",)},
)
