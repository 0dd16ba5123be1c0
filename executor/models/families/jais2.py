"""Jais 2: layer norms, biases everywhere, squared ReLU."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, flag, integer, layer_norm, llama_like, plain


def build(config: Config) -> ArchSpec:
    bias = flag(config, "mlp_bias", True)
    return llama_like(
        config,
        attention=biases(config, "attention_bias", True),
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "relu2", bias=bias),
        default_context=8192,
        norm=layer_norm(config),
    )


FAMILY = Family(("Jais2ForCausalLM",), build)
