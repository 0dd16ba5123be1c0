"""Mistral: Llama's shape; if the config has a sliding window, every layer has it."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    head_dim_of,
    integer,
    llama_like,
    optional_integer,
    rope,
)


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    layer = Positions(rope(config, head_dim, 10000.0), optional_integer(config, "sliding_window"))
    positions = [layer] * integer(config, "num_hidden_layers")
    return llama_like(config, positions=positions, head_dim=head_dim, default_context=131072)


FAMILY = Family(("MistralForCausalLM",), build)
