"""What families with latent attention share."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.families import Config
from headrace.executor.models.families._config import (
    activation,
    dense,
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    rope,
    scaled_context,
)


def deepseek(config: Config, routing: Routing, *, correction: bool) -> ArchSpec:
    """Dense layers first, then mixtures with shared experts."""
    inner = integer(config, "moe_intermediate_size")
    mixture = Experts(
        integer(config, "n_routed_experts"),
        routing,
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * integer(config, "n_shared_experts", 0),
        shared_gate=False,
        correction=correction,
    )
    first, step = integer(config, "first_k_dense_replace", 0), integer(config, "moe_layer_freq", 1)
    is_sparse = [index >= first and index % step == 0 for index in range(integer(config, "num_hidden_layers"))]
    return latent_like(config, lambda index: mixture if is_sparse[index] else dense(config))


def latent_like(config: Config, ffn: Callable[[int], Ffn], **overrides: Any) -> ArchSpec:
    """A decoder with latent attention in all layers. `overrides` are fields of ArchSpec."""
    nope_dim, rope_dim = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    rotary = replace(rope(config, rope_dim, 10000.0), rotary_dim=rope_dim)
    mixer = LatentAttention(
        num_heads=integer(config, "num_attention_heads"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer(config, "v_head_dim"),
        latent_dim=integer(config, "kv_lora_rank"),
        scale=(nope_dim + rope_dim) ** -0.5 * _temperature(config, rotary.factor) ** 2,
        rope=rotary,
        interleaved=flag(config, "rope_interleave", True),
        query_rank=optional_integer(config, "q_lora_rank"),
        bias=flag(config, "attention_bias", False),
    )
    layers = tuple(LayerSpec(mixer, ffn(index)) for index in range(integer(config, "num_hidden_layers")))
    names = WeightNames(
        shared_expert="mlp.shared_experts",
        # Layers beyond the last one predict further tokens.
        ignorable=(*WeightNames.ignorable, rf"^model\.layers\.{len(layers)}\."),
    )
    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "hidden_size": integer(config, "hidden_size"),
        "vocab_size": integer(config, "vocab_size"),
        "max_positions": scaled_context(config, rotary, 2048),
        "layers": layers,
        "norm": NormSpec("rms", number(config, "rms_norm_eps", 1e-6)),
        "tied_head": flag(config, "tie_word_embeddings", False),
        "names": names,
    }
    return ArchSpec(**(fields | overrides))


def _temperature(config: Config, factor: float) -> float:
    """Of yarn (Peng et al. 2023, eq. 22), by which queries and keys are both multiplied."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (given.get("rope_type") or given.get("type") or "default") == "default":
        return 1.0
    scale = optional_number(given, "mscale_all_dim")
    return 1.0 if not scale or factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
