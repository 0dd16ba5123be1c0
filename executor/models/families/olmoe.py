"""OLMoE: Llama's shape with experts; queries and keys of all heads are normed as one row."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import experts, flag, integer, llama_like
from headrace.ipc.failure import ModelError


def build(config: Config) -> ArchSpec:
    if config.get("clip_qkv") is not None:
        raise ModelError(f"the config's clip_qkv is {config['clip_qkv']}; OLMoE is supported without clipping alone")
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        attention={"bias": bias, "output_bias": bias, "qk_norm": "whole"},
        ffn=experts(
            config,
            integer(config, "intermediate_size"),
            renormalise=flag(config, "norm_topk_prob", False),
        ),
        default_context=4096,
    )


FAMILY = Family(("OlmoeForCausalLM",), build)
