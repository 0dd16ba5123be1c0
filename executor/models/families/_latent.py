"""Specs shared by families with latent attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.families import Config
from headrace.executor.models.families._config import (
    flag,
    further_layers,
    integer,
    mixture_after_dense,
    number,
    optional_integer,
    optional_number,
    rope,
    rope_section,
    scaled_context,
)


def deepseek(config: Config, routing: Routing, *, correction: bool) -> ArchSpec:
    """DeepSeek's decoder: latent attention, and dense FFNs in the first layers before mixtures. correction: whether a
    vector is added to the scores when experts are chosen."""
    return latent_like(config, mixture_after_dense(config, routing, correction=correction))


def latent_like(config: Config, ffn: Callable[[int], Ffn], **overrides: Any) -> ArchSpec:
    """A decoder with latent attention in all layers. ffn: by layer index. overrides: fields of ArchSpec."""
    nope_dim, rope_dim = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    rotary = replace(rope(config, rope_dim, 10000.0), rotary_dim=rope_dim)
    mixer = LatentAttention(
        num_heads=integer(config, "num_attention_heads"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer(config, "v_head_dim"),
        latent_dim=integer(config, "kv_lora_rank"),
        scale=(nope_dim + rope_dim) ** -0.5 * _temperature(config, rotary.factor) ** 2,
        rope=rotary if rope_dim else None,
        interleaved=flag(config, "rope_interleave", True),
        query_rank=optional_integer(config, "q_lora_rank"),
        bias=flag(config, "attention_bias", False),
    )
    layers = tuple(LayerSpec(mixer, ffn(index)) for index in range(integer(config, "num_hidden_layers")))
    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "hidden_size": integer(config, "hidden_size"),
        "vocab_size": integer(config, "vocab_size"),
        "max_positions": scaled_context(config, rotary, 2048),
        "layers": layers,
        "norm": NormSpec("rms", number(config, "rms_norm_eps", 1e-6)),
        "tied_head": flag(config, "tie_word_embeddings", False),
        "names": further_layers(config),
    }
    return ArchSpec(**(fields | overrides))


def _temperature(config: Config, factor: float) -> float:
    """YaRN's temperature (Peng et al. 2023, eq. 22), a factor of both queries and keys; 1 without scaling."""
    given = rope_section(config)
    if (given.get("rope_type") or given.get("type") or "default") == "default":
        return 1.0
    scale = optional_number(given, "mscale_all_dim")
    return 1.0 if not scale or factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
