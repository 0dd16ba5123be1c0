"""Mellum 2: Qwen 3's mixtures, with sliding windows in some layers, which are rotated otherwise than the others."""

from headrace.executor.models.arch import ArchSpec, RopeSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    experts,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    require_whole_sections,
    rope,
    rope_section,
    routed_layers,
)

THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}
"""Of a config without sections."""


def build(config: Config) -> ArchSpec:
    count, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config, 128)
    types, routes = layer_types(config, count, ["full_attention"] * count), routed_layers(config, 0)
    require_whole_sections(config, list(dict.fromkeys(types)), "rope_theta")
    windows = {"sliding_attention": integer(config, "sliding_window", 1024)}
    ropes = _ropes(config, head_dim)
    positions = [Positions(ropes[kind], windows.get(kind)) for kind in types]
    inner = integer(config, "moe_intermediate_size")
    mixture = experts(config, inner, renormalise=flag(config, "norm_topk_prob", True))
    return llama_like(
        config | dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")),
        positions=positions,
        head_dim=head_dim,
        attention={"qk_norm": "head", **biases(config, "attention_bias", False)},
        ffn=lambda index: mixture if routes[index] else dense(config),
        default_context=131_072,
    )


def _ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """By kind of layers. What stands beside the sections must agree with them, since transformers does not read it."""
    own = config | {"partial_rotary_factor": None}
    if not rope_section(config):
        own = own | {"rope_parameters": {kind: {"rope_theta": theta} for kind, theta in THETAS.items()}}
    full, sliding = THETAS
    return {
        full: rope(own, head_dim, THETAS[full], full),
        sliding: rope(own | {"rope_theta": None}, head_dim, THETAS[sliding], sliding),
    }


FAMILY = Family(
    ("MellumForCausalLM",),
    build,
    ignored={
        "mtp_layer_types": "of further layers, which are not run",
        "mtp_mlp_layer_types": "of further layers, which are not run",
        "num_mtp_layers": "of further layers, which are not run",
        "num_nextn_predict_layers": "of further layers, which are not run",
    },
)
