"""Qwen 3 Next and Qwen 3.5: gated delta networks, and gated attention in every fourth layer. Text only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.executor.models.arch import STACKED, ArchSpec, Fused, NormSpec, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.linear_attention import DeltaRule
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    experts,
    flag,
    integer,
    llama_like,
    number,
    rope,
    sparse_layers,
)
from headrace.executor.models.families._ssd import require_silu
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    query="self_attn.query",
    query_gate="self_attn.query_gate",
    ignorable=(*WeightNames.ignorable, r"^(model\.)?mtp\."),
)
THETA = 10000.0
ROTATED = 0.25
"""Share of a head that is rotated, where the config does not say."""


def layer_kinds(config: Config, default: Callable[[int], str]) -> list[str]:
    """linear_attention or full_attention for each layer: the config's `layer_types`, else `default`. Raises
    ModelError."""
    count = integer(config, "num_hidden_layers")
    given = config.get("layer_types")
    kinds = [default(index) for index in range(count)] if given is None else given
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"linear_attention", "full_attention"}:
        raise ModelError(
            f"the config's layer_types must be a list of linear_attention and full_attention, got {given!r:.200}"
        )
    if len(kinds) < count:
        raise ModelError(f"the config has {count} layers but {len(kinds)} layer_types")
    return kinds[:count]


def delta_rule(config: Config, **fields: object) -> DeltaRule:
    require_silu(config, "hidden_act")
    return DeltaRule(
        heads=integer(config, "linear_num_value_heads", 32),
        key_heads=integer(config, "linear_num_key_heads", 16),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        conv_width=integer(config, "linear_conv_kernel_dim", 4),
        tiled=flag(config, "value_heads_in_turn", False),
        **({"norm_eps": number(config, "rms_norm_eps", 1e-6)} | fields),  # type: ignore[arg-type]
    )


def hybrid(
    config: Config, ffn: Ffn | Callable[[int], Ffn], projections: Callable[[DeltaRule], list[Fused]]
) -> ArchSpec:
    """Gated delta networks and gated attention around an FFN. projections: how checkpoints store those of a network."""
    interval = integer(config, "full_attention_interval", 4)
    if interval < 1:
        raise ModelError(f"the config's full_attention_interval must be at least 1, got {interval}")
    kinds = layer_kinds(config, lambda index: "linear_attention" if (index + 1) % interval else "full_attention")
    head_dim, heads = integer(config, "head_dim", 256), integer(config, "num_attention_heads")
    mixer = delta_rule(config)
    gated = Fused("self_attn.q_proj", ((NAMES.query, head_dim), (NAMES.query_gate, head_dim)), groups=heads)
    rotary = rope(with_rotated_share(config, ROTATED), head_dim, THETA)
    spec = llama_like(
        config,
        positions=[Positions(rotary)] * len(kinds),
        head_dim=head_dim,
        attention={**biases(config, "attention_bias", False), "qk_norm": "head", "gated": True},
        ffn=ffn,
        default_context=32768,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        names=NAMES,
        stacked=STACKED,
        fused=(gated, *([] if mixer.problem() else [mixer.fused(), *projections(mixer)])),
    )
    layers = zip(kinds, spec.layers, strict=True)
    return replace(
        spec,
        layers=tuple(each if kind == "full_attention" else replace(each, mixer=mixer) for kind, each in layers),
    )


def with_rotated_share(config: Config, default: float) -> Config:
    """The config with `partial_rotary_factor`, if neither it nor its rotary parameters have one."""
    return {"partial_rotary_factor": default} | config


def mixture(config: Config, *, renormalise: bool) -> Experts:
    return experts(
        config,
        integer(config, "moe_intermediate_size", 512),
        renormalise=renormalise,
        shared_inner=integer(config, "shared_expert_intermediate_size", 512),
    )


def by_part(mixer: DeltaRule) -> list[Fused]:
    """The projection to queries, keys and values, one after the other."""
    at, keys, values = mixer.at, mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
    return [Fused(f"{at}.in_proj_qkv", ((f"{at}.in_q", keys), (f"{at}.in_k", keys), (f"{at}.in_v", values)))]


def _by_key_head(mixer: DeltaRule) -> list[Fused]:
    """The projections by key head, or as GGUF files have them."""
    at, values = mixer.at, mixer.heads // mixer.key_heads
    keys, inner = mixer.key_dim, values * mixer.value_dim
    mixed = ((f"{at}.in_q", keys), (f"{at}.in_k", keys), (f"{at}.in_v", inner), (f"{at}.in_proj_z", inner))
    rates = ((f"{at}.in_proj_b", values), (f"{at}.in_proj_a", values))
    groups = mixer.key_heads
    return [Fused(f"{at}.in_proj_qkvz", mixed, groups), Fused(f"{at}.in_proj_ba", rates, groups), *by_part(mixer)]


def build(config: Config) -> ArchSpec:
    ffn = sparse_layers(config, mixture(config, renormalise=flag(config, "norm_topk_prob", True)))
    return hybrid(config, ffn, _by_key_head)


FAMILY = Family(("Qwen3NextForCausalLM",), build)
