"""Muse Glimmer: Gemma 2's shape with gated attention, rotary positions and windows in all but every fourth layer, and
norms without weights on embeddings, queries and keys."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    number,
    positive,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(query_gate="self_attn.gate_proj", mlp_norm="pre_feedforward_layernorm")


def build(config: Config) -> ArchSpec:
    head_dim, eps = head_dim_of(config, 128), number(config, "rms_norm_eps", 1e-5)
    centred, plain = NormSpec("rms", eps, weight_offset=1.0), NormSpec("rms", eps)
    after, bare = replace(centred, eps=number(config, "post_norm_eps", 1e-8)), replace(plain, affine=False)
    return llama_like(
        config,
        positions=_positions(config, head_dim),
        head_dim=head_dim,
        default_context=131_072,
        norm=centred,
        norm_placement="sandwich",
        other_norms=(
            (NAMES.embedding_norm, bare),
            (NAMES.query_norm, bare),
            (NAMES.key_norm, bare),
            (NAMES.attention_post_norm, after),
            (NAMES.mlp_post_norm, after),
            (NAMES.final_norm, plain),
        ),
        attention={
            **biases(config, "attention_bias", False),
            "scale": head_dim**-0.5 * positive(config, "qk_scale_factor", 3.87),
            "qk_norm": "head",
            "gated": True,
        },
        ffn=dense(config, "hidden_activation", "silu"),
        embedding_norm=True,
        logit_scale=positive(config, "output_multiplier", 0.19611613513818404),
        final_soft_cap=positive(config, "final_logit_softcapping", 20.0),
        names=NAMES,
    )


def _positions(config: Config, head_dim: int) -> list[Positions]:
    count, rotary = integer(config, "num_hidden_layers"), rope(config, head_dim, 10_000.0)
    is_full = [(count - 1 - index) % 4 == 0 for index in range(count)]
    types = layer_types(config, count, ["full_attention" if each else "sliding_attention" for each in is_full])
    thetas = config.get("layer_rope_theta") or [0 if each else rotary.theta for each in is_full]
    if not isinstance(thetas, list) or len(thetas) != count or not set(thetas) <= {0, rotary.theta}:
        raise ModelError(
            f"the config's layer_rope_theta must be 0 or rope_theta ({rotary.theta}) for each of {count} layers, "
            f"got {thetas!r:.80}"
        )
    window = integer(config, "sliding_window", 2048)
    return [
        Positions(rotary if theta else None, window if kind == "sliding_attention" else None)
        for theta, kind in zip(thetas, types, strict=True)
    ]


FAMILY = Family(("MuseGlimmerForCausalLM",), build)
