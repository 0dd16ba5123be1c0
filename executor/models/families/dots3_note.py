"""dots3-note: DeepSeek's shape with latent attention whose heads are gated. Some layers have windows and sizes of their
own, the others an index that chooses the keys, or neither."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.sparse_latent import SparseLatentAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    further_layers,
    integer,
    layer_configs,
    mixture_after_dense,
    number,
    require_whole_sections,
    rope,
    rope_section,
    text_part,
)
from headrace.executor.models.families._latent import latent_like
from headrace.ipc.failure import ModelError

FULL, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
THETAS = {FULL: 80_000_000.0, INDEXED: 80_000_000.0, SLIDING: 50_000.0}
"""Of a config without sections."""
DEFAULTS = {
    "head_dim": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1024, "n_shared_experts": 1, "max_position_embeddings": 524_288, "rms_norm_eps": 1e-5,
}  # fmt: skip
OF_WINDOWS = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
    "qk_nope_head_dim": 192, "v_head_dim": 128,
}  # fmt: skip
"""Sizes of the layers with windows, which published configs have behind `swa_`."""
SIZES = (*OF_WINDOWS, "qk_rope_head_dim")


def build(config: Config) -> ArchSpec:
    config = (DEFAULTS | text_part(config)).renamed(
        sliding_window="sliding_window_size",
        shared_experts_intermediate_size="moe_shared_expert_intermediate_size",
    )
    count = integer(config, "num_hidden_layers")
    kinds = _kinds(config, count)
    if INDEXED not in kinds:
        config.pass_over("index_")
    if SLIDING not in kinds:
        config.pass_over("sliding_window", "swa_")
    ropes = _ropes(config, kinds)
    spec = latent_like(
        config | {"rope_parameters": None, "rope_scaling": None, "rope_theta": None},
        _ffns(config, count),
        names=_names(config),
    )
    layers = [
        LayerSpec(_mixer(own, kind, ropes[kind], spec.hidden_size), layer.ffn)
        for own, kind, layer in zip(_configs(config, kinds), kinds, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def _kinds(config: Config, count: int) -> list[str]:
    """Each layer's kind of attention. Raises ModelError."""
    indexes = flag(config, "use_dsa", True) if config.get("per_layer_config") is None or "use_dsa" in config else None
    slides = flag(config, "use_sliding_window", True)
    given = config.get("layer_types")
    if given is None:
        given = [SLIDING if slides and i >= 2 and i % 4 != 1 else INDEXED for i in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {FULL, SLIDING, INDEXED}:
        raise ModelError(
            f"the config's layer_types must list {FULL}, {SLIDING} or {INDEXED} for each layer, got {given!r:.80}"
        )
    if indexes is None:
        return [str(each) for each in given[:count]]
    return [SLIDING if each == SLIDING else INDEXED if indexes else FULL for each in given[:count]]


def _configs(config: Config, kinds: list[str]) -> list[Config]:
    """The config as each layer has it. Raises ModelError."""
    if config.get("per_layer_config") is not None:
        return layer_configs(config, len(kinds), *SIZES)
    own: dict[str, Any] = {name: integer(config, f"swa_{name}", size) for name, size in OF_WINDOWS.items()}
    rest = own["head_dim"] - own["qk_nope_head_dim"]
    own["qk_rope_head_dim"] = integer(config, "swa_qk_rope_head_dim", rest)
    return [config | own if kind == SLIDING else config for kind in kinds]


def _mixer(config: Config, kind: str, rotary: RopeSpec, hidden: int) -> LatentAttention:
    nope_dim, rope_dim = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    heads, head_dim = integer(config, "num_attention_heads"), integer(config, "head_dim")
    if integer(config, "num_key_value_heads", heads) != heads:
        raise ModelError("the config's num_key_value_heads must be its num_attention_heads, in all layers")
    if kind == SLIDING and nope_dim + rope_dim != head_dim:
        raise ModelError(
            f"the config's heads of {head_dim} dimensions in windows have {nope_dim} and {rope_dim} rotary"
        )
    query_rank, latent_dim = integer(config, "q_lora_rank"), integer(config, "kv_lora_rank")
    plain = LatentAttention(
        num_heads=heads,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer(config, "v_head_dim"),
        latent_dim=latent_dim,
        scale=(nope_dim + rope_dim) ** -0.5,
        rope=replace(rotary, rotary_dim=rope_dim),
        query_rank=query_rank,
        bias=flag(config, "attention_bias", False),
        gate="head",
        latent_eps=number(config, "rms_norm_eps"),
        sliding_window=integer(config, "sliding_window", 512) if kind == SLIDING else None,
        query_scale=(hidden / max(1, query_rank)) ** 0.5,
        latent_scale=(hidden / max(1, latent_dim)) ** 0.5,
        rotary_key_norm="self_attn.k_rope_only_layernorm",
    )
    if kind != INDEXED:
        return plain
    return SparseLatentAttention(
        **vars(plain),
        num_chosen=integer(config, "index_topk", 2048),
        index="pairs",
        index_heads=integer(config, "index_n_heads", 64),
        index_dim=integer(config, "index_head_dim", 128),
    )


def _ropes(config: Config, kinds: list[str]) -> Mapping[str, RopeSpec]:
    """By kind of layers; how many dimensions are rotated is said by their sizes."""
    own = config | {"partial_rotary_factor": None}
    if not rope_section(config):
        thetas = {
            kind: number(config, "swa_rope_theta" if kind == SLIDING else "rope_theta", theta)
            for kind, theta in THETAS.items()
        }
        own = own | {"rope_parameters": {kind: {"rope_theta": theta} for kind, theta in thetas.items()}}
    else:
        require_whole_sections(config, list(dict.fromkeys(kinds)), "rope_theta")
        config.pass_over("swa_rope_theta")
    own = own | {"rope_theta": None}
    return {kind: rope(own, 2, THETAS[kind], kind) for kind in dict.fromkeys(kinds)}


def _ffns(config: Config, count: int) -> Any:
    """DeepSeek V3's by layer index, with shared experts of their own size."""
    given = config.get("moe_layer_freq")
    if isinstance(given, list):
        first = integer(config, "first_k_dense_replace", 1)
        if len(given) < count:
            raise ModelError(f"the config has {count} layers but {len(given)} values of moe_layer_freq")
        routes = ["sparse" if i >= first and given[i] else "dense" for i in range(count)]
        config = config | {"moe_layer_freq": None, "mlp_layer_types": config.get("mlp_layer_types") or routes}
    ffns = mixture_after_dense(config, corrected_routing(config), default_dense=1)
    shared = integer(config, "shared_experts_intermediate_size", 1536) * integer(config, "n_shared_experts")

    def ffn(index: int) -> Ffn:
        found = ffns(index)
        return replace(found, shared_inner=shared) if isinstance(found, Experts) else found

    return ffn


def _names(config: Config) -> WeightNames:
    names = further_layers(config)
    return replace(
        names,
        prefixes=("model.", "model.language_model.", ""),
        query_gate="self_attn.g_proj",
        ignorable=(*names.ignorable, r"(^|\.)mtp\.", r"(^|\.)(vision|audio)_(tower|model|encoder|adapter)\."),
    )


FAMILY = Family(
    ("Dots3NoteForCausalLM",),
    build,
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "mlp_bias": (False,)},
)
