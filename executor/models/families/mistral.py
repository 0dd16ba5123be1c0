"""Mistral: Llama's shape; where the config has a window, every layer slides."""

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer, llama_like, optional_integer, rope


def to_spec(config: Config) -> ArchSpec:
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    layer = LayerSpec(rope(config, head_dim, 10000.0), optional_integer(config, "sliding_window"))
    layers = [layer] * integer(config, "num_hidden_layers")
    return llama_like(config, layers=layers, head_dim=head_dim, default_context=131072)


FAMILY = Family(("MistralForCausalLM",), to_spec)
