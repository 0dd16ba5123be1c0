"""Helium: Llama's shape with interleaved rotation (of neighbouring pairs)."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, flag, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention={"bias": flag(config, "attention_bias", False)},
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=4096,
        interleaved=True,
    )


FAMILY = Family(("HeliumForCausalLM",), build)
