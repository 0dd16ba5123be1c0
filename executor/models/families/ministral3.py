"""Ministral 3: Mistral's shape, with YaRN and queries that grow with positions beyond the trained context."""

from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    head_dim_of,
    integer,
    llama_like,
    number,
    optional_integer,
    rope,
    rope_section,
)
from headrace.executor.models.families._defaults import says_rope

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a config that has none."""
THETA, CONTEXT = 10_000.0, 262_144
"""The base of a section that has none, and the context of a config that has none."""


def build(config: Config) -> ArchSpec:
    if not says_rope(config):
        config = config | {"rope_parameters": ROPE}
    head_dim = head_dim_of(config, None if "head_dim" in config else 128)
    layer = Positions(rope(config, head_dim, THETA), optional_integer(config, "sliding_window"))
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        attention={"query_growth": query_growth(config)},
        default_context=CONTEXT,
    )


def query_growth(config: Config) -> tuple[int, float, int] | None:
    """`Attention.query_growth` as the rotation's section has it."""
    given = rope_section(config)
    if given.get("llama_4_scaling_beta") is None:
        return None
    name = "original_max_position_embeddings"  # beside the section, in it, or the whole context
    original = integer(config, name, integer(given, name, integer(config, "max_position_embeddings", CONTEXT)))
    return original, number(given, "llama_4_scaling_beta"), 0


FAMILY = Family(
    ("Ministral3ForCausalLM",),
    build,
    ignored={"max_position_embeddings": "of the rotation's section: the config's own is read"},
)
