"""FlexOlmo: OLMo 2's shape, with norms on the outputs of blocks, and OLMoE's experts."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, experts, flag, integer, llama_like


def build(config: Config) -> ArchSpec:
    mixture = experts(config, integer(config, "intermediate_size"), renormalise=flag(config, "norm_topk_prob", False))
    return llama_like(
        config,
        attention={"qk_norm": "whole", **biases(config, "attention_bias", False)},
        ffn=mixture,
        norm_placement="output",
        default_context=4096,
    )


FAMILY = Family(("FlexOlmoForCausalLM",), build)
