"""Arcee (AFM): Llama's shape with squared ReLU in an FFN without a gate."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, flag, integer, llama_like, plain


def build(config: Config) -> ArchSpec:
    bias = flag(config, "mlp_bias", False)
    return llama_like(
        config,
        attention=biases(config, "attention_bias", False),
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "relu2", bias=bias),
        default_context=4096,
    )


FAMILY = Family(("ArceeForCausalLM",), build)
