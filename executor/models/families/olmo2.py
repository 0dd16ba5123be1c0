"""OLMo 2: norms on the outputs of attention and FFN; queries (and keys) of all heads are normed as one row."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention={"qk_norm": "whole", **biases(config, "attention_bias", False)},
        norm_placement="output",
    )


FAMILY = Family(("Olmo2ForCausalLM",), build)
