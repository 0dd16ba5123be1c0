"""LFM3: LFM2's convolutions and Qwen 3's attention with a gate per head, with windows in some layers, and norms around
both blocks."""

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.short_convolution import ShortConv
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    rope,
    rope_section,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    final_norm="embedding_norm",
    query_gate="self_attn.g_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attention_norm="operator_norm",
    attention_post_norm="post_operator_norm",
    mlp_norm="ffn_norm",
    mlp_post_norm="post_ffn_norm",
    renamed=((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),),
)
CONV, FULL, SLIDING = "conv", "full_attention", "sliding_attention"
ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""Of a config that has none."""
THETA = 1_000_000.0
"""The base of a section that has none."""


def build(config: Config) -> ArchSpec:
    config = {"num_key_value_heads": 4} | config.renamed(norm_eps="rms_norm_eps")
    if not rope_section(config):
        config = config | {"rope_parameters": ROPES}
    hidden, head_dim = integer(config, "hidden_size"), head_dim_of(config, 128)
    kinds = _kinds(config, integer(config, "num_hidden_layers"))
    attends = [kind for kind in dict.fromkeys(kinds) if kind != CONV]
    windows = {SLIDING: integer(config, "sliding_window", 256)} if SLIDING in attends else {}
    if SLIDING not in attends:
        config.pass_over("sliding_window")
    of_kind = {kind: Positions(rope(config, head_dim, THETA, kind), windows.get(kind)) for kind in attends}
    spec = llama_like(
        config | {"rope_parameters": None, "rope_scaling": None, "rope_theta": None},
        positions=[of_kind.get(kind, Positions(None)) for kind in kinds],
        head_dim=head_dim,
        attention={
            "qk_norm": "head",
            "head_gate": flag(config, "use_attention_gate", True),
            **biases(config, "attention_bias", False),
        },
        ffn=Dense(integer(config, "intermediate_size"), "silu"),
        default_context=128_000,
        tied_head=True,
        norm=NormSpec("rms", number(config, "norm_eps", 1e-5)),
        norm_placement="sandwich" if flag(config, "use_sandwich_norm", True) else "pre",
        names=NAMES,
        fused=(ShortConv.fused(hidden),),
    )
    conv = ShortConv(channels=hidden, width=integer(config, "conv_L_cache", 7), bias=flag(config, "conv_bias", False))
    layers = (
        replace(layer, mixer=conv) if kind == CONV else layer for kind, layer in zip(kinds, spec.layers, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _kinds(config: Config, count: int) -> list[str]:
    """Each layer's kind: `layer_types`, else attention in each second layer from the third on. Raises ModelError."""
    given = config.get("layer_types")
    if given is None:
        given = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {CONV, FULL, SLIDING}:
        raise ModelError(
            f"the config's layer_types must be {CONV}, {FULL} or {SLIDING} for each of {count} layers, "
            f"got {given!r:.80}"
        )
    return [str(each) for each in given[:count]]


FAMILY = Family(("Lfm3ForCausalLM",), build)
