"""Phi 3.5 MoE: Mixtral's shape with layer norms, biases and LongRoPE, and two experts weighted by SparseMixer."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, RopeSpec
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    activation,
    biases,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    number,
    optional_integer,
    rope,
    rope_section,
)
from headrace.executor.models.families.mixtral import NAMES


def build(config: Config) -> ArchSpec:
    chosen = integer(config, "num_experts_per_tok", 2)
    if chosen != 2:
        raise NotNativeError(f"SparseMixer weights two experts of a token, not num_experts_per_tok={chosen}")
    mixture = Experts(
        integer(config, "num_local_experts", 16),
        Routing(2, "sparsemixer", renormalise=False, margin=2 * number(config, "router_jitter_noise", 0.01)),
        integer(config, "intermediate_size"),
        activation(config, "hidden_act", "silu"),
    )
    head_dim = head_dim_of(config)
    rotary = _with_own_magnitude(config, rope(config, head_dim, 1e6))
    layer = Positions(rotary, optional_integer(config, "sliding_window"))
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        attention=biases(config, "attention_bias", False),
        ffn=mixture,
        default_context=131072,
        norm=layer_norm(config, "rms_norm_eps"),
        head_bias=flag(config, "lm_head_bias", False),
        names=NAMES,
    )


def _with_own_magnitude(config: Config, rotary: RopeSpec) -> RopeSpec:
    """The rotation with the attention factor that short_mscale and long_mscale give, if the config has them. Raises
    NotNativeError if they differ."""
    given = rope_section(config)
    if given.get("short_mscale") is None:
        return rotary
    scale = number(given, "short_mscale")
    if number(given, "long_mscale", scale) != scale:
        raise NotNativeError("the config's short_mscale and long_mscale differ, which is not supported")
    return replace(rotary, attention_factor=scale)


FAMILY = Family(("PhiMoEForCausalLM", "PhimoeForCausalLM"), build)
