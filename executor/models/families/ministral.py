"""Ministral: Mistral's shape with sliding windows in the layers that the config's layer_types name."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    by_type,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    optional_integer,
    rope,
)


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    window = optional_integer(config, "sliding_window")
    types = layer_types(config, num_layers, ["sliding_attention" if window else "full_attention"] * num_layers)
    return llama_like(
        config,
        positions=by_type(types, rope(config, head_dim, 10000.0), window),
        head_dim=head_dim,
        default_context=131072,
    )


FAMILY = Family(("MinistralForCausalLM",), build)
