"""Mistral 4 (Mistral Small 4, Mistral Large 3): DeepSeek V3's shape, whose experts have softmax scores, with YaRN and
queries that grow with positions beyond the trained context."""

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing
from headrace.executor.models.families._defaults import says_rope
from headrace.executor.models.families._latent import deepseek
from headrace.executor.models.families.ministral3 import query_growth

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a config that has none."""


def build(config: Config) -> ArchSpec:
    config = {"n_shared_experts": 1} | config
    if not says_rope(config):
        config = config | {"rope_parameters": ROPE}
    spec = deepseek(config, replace(corrected_routing(config), scoring="softmax"), correction=False)
    growth, layers = query_growth(config), []
    for layer in spec.layers:
        assert isinstance(layer.mixer, LatentAttention)
        layers.append(replace(layer, mixer=replace(layer.mixer, query_growth=growth)))
    return replace(spec, layers=tuple(layers), stacked=STACKED)


FAMILY = Family(
    ("Mistral4ForCausalLM", "MistralLarge3ForCausalLM"),
    build,
    ignored={
        "max_position_embeddings": "of the rotation's section: the config's own is read",
        "partial_rotary_factor": "qk_rope_head_dim says it",
    },
)
