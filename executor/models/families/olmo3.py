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


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    default = ["full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(num_layers)]
    full = Positions(rope(config, head_dim, 10000.0, "full_attention"))
    # The fields before transformers 5 scale the full layers only.
    local = config if "sliding_attention" in rope_section(config) else without_scaling(config)
    sliding = Positions(
        rope(local, head_dim, 10000.0, "sliding_attention"), optional_integer(config, "sliding_window") or 4096
    )
    return llama_like(
        config,
        positions=[
            sliding if kind == "sliding_attention" else full for kind in layer_types(config, num_layers, default)
        ],
        head_dim=head_dim,
        attention={"qk_norm": "whole", **biases(config, "attention_bias", False)},
        max_positions=scaled_context(config, full.rope, 2048) if full.rope else 2048,
        norm_placement="output",
    )


def without_scaling(config: Config) -> Config:
    return config | {"rope_scaling": None, "rope_parameters": None}


FAMILY = Family(("Olmo3ForCausalLM",), build)
