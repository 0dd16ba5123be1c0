"""Llama 2, 3 and 3.x, and the many models published in its shape (SmolLM 2 among them)."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, llama_like


def to_spec(config: Config) -> ArchSpec:
    bias = flag(config, "attention_bias", False)
    return llama_like(config, attention_bias=bias, output_bias=bias, mlp_bias=flag(config, "mlp_bias", False))


FAMILY = Family(("LlamaForCausalLM",), to_spec)
