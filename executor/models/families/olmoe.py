"""OLMoE: Llama's shape with experts; queries and keys of all heads are normed as one row."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import experts, flag, integer, llama_like, optional_number


def build(config: Config) -> ArchSpec:
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        attention={
            "bias": bias,
            "output_bias": bias,
            "qk_norm": "whole",
            "clip_qkv": optional_number(config, "clip_qkv"),
        },
        ffn=experts(
            config,
            integer(config, "intermediate_size"),
            renormalise=flag(config, "norm_topk_prob", False),
        ),
        default_context=4096,
    )


FAMILY = Family(("OlmoeForCausalLM",), build)
