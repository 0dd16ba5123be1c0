"""Code World Model: Llama's shape with sliding windows in most layers."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    by_type,
    dense,
    flag,
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
    default = ["full_attention" if index % 4 == 0 else "sliding_attention" for index in range(num_layers)]
    return llama_like(
        config,
        positions=by_type(layer_types(config, num_layers, default), rope(config, head_dim, 1e6), window),
        head_dim=head_dim,
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=131072,
    )


FAMILY = Family(("CwmForCausalLM",), build)
