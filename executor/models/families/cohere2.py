"""Command R7B and A: Command R's shape with three sliding-window layers with rotation per full one without."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    every_nth_full,
    head_dim_of,
    integer,
    layer_norm,
    layer_types,
    llama_like,
    optional_integer,
    positive,
    rope,
)
from headrace.executor.models.families.cohere import NAMES


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    pattern = integer(config, "sliding_window_pattern", 4)
    default = every_nth_full(num_layers, pattern, "sliding_window_pattern")
    rotary = replace(rope(config, head_dim, 10000.0), interleaved=True)
    sliding = Positions(rotary, optional_integer(config, "sliding_window"))
    types = layer_types(config, num_layers, default)
    return llama_like(
        config,
        positions=[sliding if kind == "sliding_attention" else Positions(None) for kind in types],
        head_dim=head_dim,
        attention=biases(config, "attention_bias", False),
        max_positions=integer(config, "model_max_length", integer(config, "max_position_embeddings", 8192)),
        tied_head=True,
        norm=layer_norm(config, bias=False),
        norm_placement="parallel",
        logit_scale=positive(config, "logit_scale", 0.0625),
        names=NAMES,
    )


IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "use_embedding_sharing": "tie_word_embeddings says it",
        "layer_switch": "sliding_window_pattern says it",
        "use_parallel_embedding": "a layout of training over devices",
    }
)
ASSUMES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_qk_norm": (False,),
    }
)

FAMILY = Family(("Cohere2ForCausalLM",), build, ignored=IGNORED, assumes=ASSUMES)
