"""Qwen 2 and 2.5: Llama's shape with biases on query, key and value."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer, llama_like, qwen_layers, rope


def to_spec(config: Config) -> ArchSpec:
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    layers = qwen_layers(config, rope(config, head_dim, 10000.0))
    return llama_like(config, layers=layers, head_dim=head_dim, default_context=32768, attention_bias=True)


FAMILY = Family(("Qwen2ForCausalLM",), to_spec)
