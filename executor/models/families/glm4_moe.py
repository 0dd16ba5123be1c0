"""GLM 4.5 to 4.7 with experts: grouped-query attention and DeepSeek V3's mixtures."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    further_layers,
    llama_like,
    mixture_after_dense,
)


def build(config: Config) -> ArchSpec:
    config = {"partial_rotary_factor": 0.5} | config
    return llama_like(
        config,
        attention={
            "bias": flag(config, "attention_bias", False),
            "qk_norm": "head" if flag(config, "use_qk_norm", False) else "no",
        },
        ffn=mixture_after_dense(config, corrected_routing(config), default_dense=1),
        names=further_layers(config),
        default_context=131072,
    )


FAMILY = Family(
    ("Glm4MoeForCausalLM",), build, assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc")}
)
