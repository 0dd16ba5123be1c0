"""MiniCPM 1 and 2: Llama's shape with multipliers of embeddings, residuals and logits."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import biases, integer, llama_like
from headrace.executor.models.families.minicpm3 import multipliers


def build(config: Config) -> ArchSpec:
    if integer(config, "num_experts", 0):
        raise NotNativeError("this MiniCPM is a mixture of experts, which is not supported")
    return llama_like(config, attention=biases(config, "attention_bias", False), **multipliers(config))


FAMILY = Family(("MiniCPMForCausalLM",), build, ignored={"mup_denominator": "of its draft model"})
