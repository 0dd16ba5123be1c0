"""OLMo 3: OLMo 2's shape with three sliding-window layers per full one; the full ones have their own rotation."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    optional_integer,
    rope,
    rope_section,
    scaled_context,
)

THETA = 500_000.0
"""The base of a section that has none, and of layers of a type that has no section."""


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    default = ["full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(num_layers)]
    full_rope = rope(config, head_dim, THETA, "full_attention")
    by_type = any(kind in rope_section(config) for kind in ("full_attention", "sliding_attention"))
    # The fields before transformers 5 scale the full layers only; the base is that of all.
    local = config if by_type else config | {"rope_scaling": None, "rope_parameters": {"rope_theta": full_rope.theta}}
    full = Positions(full_rope)
    sliding = Positions(
        rope(local, head_dim, THETA, "sliding_attention"), optional_integer(config, "sliding_window") or 4096
    )
    return llama_like(
        config,
        positions=[
            sliding if kind == "sliding_attention" else full for kind in layer_types(config, num_layers, default)
        ],
        head_dim=head_dim,
        attention={"qk_norm": "whole", **biases(config, "attention_bias", False)},
        max_positions=scaled_context(config, full_rope, 2048),
        norm_placement="output",
    )


FAMILY = Family(("Olmo3ForCausalLM",), build)
