"""dots.llm1: Qwen 3's attention with DeepSeek V3's mixtures."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    by_type,
    corrected_routing,
    flag,
    further_layers,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    mixture_after_dense,
    optional_integer,
    rope,
)


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    window, first = optional_integer(config, "sliding_window"), integer(config, "max_window_layers", 62)
    default = ["sliding_attention" if window and index >= first else "full_attention" for index in range(num_layers)]
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        positions=by_type(layer_types(config, num_layers, default), rope(config, head_dim, 10000.0), window),
        attention={"bias": bias, "output_bias": bias, "qk_norm": "head"},
        ffn=mixture_after_dense(config, corrected_routing(config)),
        names=further_layers(config),
    )


FAMILY = Family(
    ("Dots1ForCausalLM",), build, assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc")}
)
