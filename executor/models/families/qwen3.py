"""Qwen 3, dense: Llama's shape with each head's query and key normalised."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, llama_like, qwen_layers, rope


def to_spec(config: Config) -> ArchSpec:
    head_dim = integer(config, "head_dim", 128)
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        layers=qwen_layers(config, rope(config, head_dim, 10000.0)),
        head_dim=head_dim,
        default_context=32768,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


FAMILY = Family(("Qwen3ForCausalLM",), to_spec)
