"""PLaMo 3: Gemma 3's shape with fused matrices, SiLU, embeddings as they are, and norms after blocks whose weights are
kept as differences from 1/5 and 1/5^1.5."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    dense,
    every_nth_full,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    number,
    rope,
    rope_section,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    layers="layers.layers",
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    output="mixer.o_proj",
    query_norm="mixer.q_norm",
    key_norm="mixer.k_norm",
    attention_norm="pre_mixer_norm",
    attention_post_norm="post_mixer_norm",
    mlp_norm="pre_mlp_norm",
    mlp_post_norm="post_mlp_norm",
)


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    norm = NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0)
    return llama_like(
        {"tie_word_embeddings": True} | config,
        positions=_positions(config, head_dim),
        head_dim=head_dim,
        norm=norm,
        norm_placement="sandwich",
        other_norms=offset_norms(norm),
        attention={"qk_norm": "head"},
        ffn=dense(config, "hidden_act", "silu"),
        fused=fused_matrices(config, head_dim),
        names=NAMES,
    )


def offset_norms(norm: NormSpec) -> tuple[tuple[str, NormSpec], ...]:
    """Those after the blocks, which differ from the others."""
    return (
        (NAMES.attention_post_norm, replace(norm, weight_offset=5**-1.0)),
        (NAMES.mlp_post_norm, replace(norm, weight_offset=5**-1.5)),
    )


def fused_matrices(config: Config, head_dim: int) -> tuple[Fused, ...]:
    heads, inner = integer(config, "num_attention_heads"), integer(config, "intermediate_size")
    kv_heads = integer(config, "num_key_value_heads", heads)
    rows = ((NAMES.query, heads * head_dim), (NAMES.key, kv_heads * head_dim), (NAMES.value, kv_heads * head_dim))
    return (
        Fused("mixer.qkv_proj", rows),
        Fused("mlp.gate_up_proj", ((NAMES.gate, inner), (NAMES.up, inner))),
    )


def _positions(config: Config, head_dim: int) -> list[Positions]:
    """Of each layer. Raises ModelError."""
    count, pattern = integer(config, "num_hidden_layers"), integer(config, "sliding_window_pattern", 8)
    default = every_nth_full(count, pattern, "sliding_window_pattern")
    types = layer_types(config, count, default)
    full = rope(config, head_dim, 1_000_000.0, "full_attention")
    # The fields before transformers 5 scale the full layers only, and have a separate base for sliding layers.
    local = config if "sliding_attention" in rope_section(config) else Config({})
    sliding = rope(local, head_dim, number(config, "rope_local_theta", 10_000.0), "sliding_attention")
    windows = _windows(config, types)
    return [
        Positions(sliding if kind == "sliding_attention" else full, window)
        for kind, window in zip(types, windows, strict=True)
    ]


def _windows(config: Config, types: Sequence[str]) -> list[int | None]:
    """Of each layer: a list in the config, or one number for those that slide. Raises ModelError."""
    key = next(
        (key for key in ("interleaved_sliding_window", "sliding_window") if isinstance(config.get(key), list)), ""
    )
    if not key:
        window = integer(config, "sliding_window", 2048)
        return [window if kind == "sliding_attention" else None for kind in types]
    given = config[key]
    if len(given) != len(types) or not all(each is None or (type(each) is int and each > 0) for each in given):
        raise ModelError(
            f"the config's {key} must have a whole number above 0, or null, for each of {len(types)} layers, "
            f"got {given!r:.80}"
        )
    return list(given)


FAMILY = Family(
    ("Plamo3ForCausalLM",), build, ignored={"sliding_window": "interleaved_sliding_window says it of each layer"}
)
