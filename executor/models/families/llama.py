"""Llama 2, 3 and 3.x, and the many models published in its shape (SmolLM 2 among them)."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, flag, llama_like


def build(config: Config) -> ArchSpec:
    ffn = dense(config, bias=flag(config, "mlp_bias", False))
    return llama_like(config, attention=biases(config, "attention_bias", False), ffn=ffn)


FAMILY = Family(
    (
        *("LlamaForCausalLM", "LLaMAForCausalLM", "AquilaForCausalLM", "XverseForCausalLM", "IQuestCoderForCausalLM"),
        "TeleChat3ForCausalLM",
    ),
    build,
)
