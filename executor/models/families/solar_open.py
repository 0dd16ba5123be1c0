"""Solar Open: Llama's attention with DeepSeek V3's mixtures, in every layer."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    further_layers,
    head_dim_of,
    llama_like,
    mixture_after_dense,
)


def build(config: Config) -> ArchSpec:
    config = {"n_shared_experts": 1} | config | {"first_k_dense_replace": 0}
    return llama_like(
        config,
        head_dim=head_dim_of(config, 128),
        attention={"bias": flag(config, "attention_bias", False)},
        ffn=mixture_after_dense(config, corrected_routing(config)),
        names=further_layers(config),
        default_context=131_072,
    )


FAMILY = Family(
    ("SolarOpenForCausalLM",),
    build,
    ignored={
        "first_k_dense_replace": "every layer has experts",
        "intermediate_size": "of dense layers, which there are none of",
        "partial_rotary_factor": "heads are rotated as a whole",
    },
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc"), "use_qk_norm": (False,)},
)
