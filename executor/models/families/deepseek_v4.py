"""DeepSeek V4: hyper-connections, attention to a window and to compressed keys, and experts of which the token's id
chooses in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec, LayerSpec, NormSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.compressed_attention import CompressedAttention, Compression
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.hashed_experts import ExpertsByToken
from headrace.executor.models.blocks.hyper_connections import HyperConnections
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    flag,
    integer,
    limited_silu,
    number,
    one_of,
    optional_integer,
    optional_number,
    require_whole_sections,
    rope,
    rope_section,
    scaled_context,
)
from headrace.executor.models.families._ssd import require_silu
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    shared_expert="mlp.shared_experts",
    ignorable=(*WeightNames.ignorable, r"(^|\.)mtp\."),
    renamed=(
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.attn_sink$", ".sinks"),
        (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
        (r"\.wq_(a|b)\.", r".q_\1_proj."),
        (r"\.wo_(a|b)\.", r".o_\1_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"(^|\.)hc_head_(fn|base|scale)$", r"\1hc_head.hc_\2"),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"(^|\.)embed\.", r"\1embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
    ),
)
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES: Mapping[str, int] = {SPARSE: 4, HEAVY: 128}
"""Tokens of a window that is compressed to an entry, by type of layer, where the config does not say."""


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    count, eps = integer(config, "num_hidden_layers"), number(config, "rms_norm_eps", 1e-6)
    kinds, rates = _kinds(config, count), _rates(config)
    ropes = _ropes(config)
    mixers = {kind: _mixer(config, kind, rates, ropes, eps) for kind in dict.fromkeys(kinds)}
    ffns = _ffns(config, count)
    hidden = integer(config, "hidden_size")
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=scaled_context(config, ropes["compress"], 1_048_576),
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)),
        norm=NormSpec("rms", eps),
        tied_head=flag(config, "tie_word_embeddings", False),
        names=NAMES,
        stacked=STACKED,
        stream=mixed_connections(config, hidden, eps),
    )


def mixed_connections(config: Config, hidden: int, norm_eps: float, *, weighted_end: bool = True) -> HyperConnections:
    """A stream whose rows are mixed with one another."""
    return HyperConnections(
        hidden=hidden,
        num_rows=integer(config, "hc_mult", 4),
        norm_eps=norm_eps,
        eps=number(config, "hc_eps", 1e-6),
        magnitude=2.0,
        least=0.0,
        mixing_steps=max(1, integer(config, "hc_sinkhorn_iters", 20)),
        weighted_end=weighted_end,
    )


def _kinds(config: Config, count: int) -> list[str]:
    """Each layer's type: from layer_types or, as first published, the rate of each in compress_ratios. Raises
    ModelError."""
    given, ratios, rates = config.get("layer_types"), config.get("compress_ratios"), _rates(config)
    if given is None and ratios is not None:
        kinds = {0: SLIDING, **{rate: kind for kind, rate in RATES.items()}}
        if not isinstance(ratios, list) or not all(type(each) is int and each in kinds for each in ratios):
            raise ModelError(f"the config's compress_ratios must be of {sorted(kinds)}, got {ratios!r:.80}")
        given = [kinds[each] for each in ratios]
    if given is None:
        given = [HEAVY if index < 2 or index % 2 == 0 else SPARSE for index in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {SLIDING, *rates}:
        raise ModelError(
            f"the config's layer_types must be {SLIDING}, {SPARSE} or {HEAVY} for each of {count} layers, "
            f"got {given!r:.80}"
        )
    return [str(each) for each in given[:count]]


def _rates(config: Config) -> dict[str, int]:
    """Tokens of a window by type of layer; older configs have each under a name of its own."""
    given = config.section("compress_rates")
    old = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    return {kind: integer(config, old[kind], integer(given, kind, rate)) for kind, rate in RATES.items()}


def _ropes(config: Config) -> dict[str, RopeSpec]:
    """Of layers with a window alone ("main"), and of the others ("compress"), whose scaling does not change the size of
    queries and keys unless the config says so. Raises ModelError."""
    head_dim, given = integer(config, "head_dim", 512), rope_section(config)
    old = optional_integer(config, "qk_rope_head_dim")
    share = number(config, "partial_rotary_factor", (64 if old is None else old) / head_dim)
    if old is not None and old != int(head_dim * share):
        raise ModelError(f"the config's qk_rope_head_dim is {old}, and {share:g} of {head_dim} are rotated")
    bases = {
        "main": number(config, "rope_theta", 10_000.0),
        "compress": number(config, "compress_rope_theta", 160_000.0),
    }
    view = config | {"rope_theta": None, "partial_rotary_factor": share}
    if not bases.keys() & given.keys():
        scaled = replace(rope(view, head_dim, bases["compress"]), theta=bases["compress"])
        if scaled.rotary_dim != int(head_dim * share):
            raise ModelError(
                f"the config's rope parameters rotate {scaled.rotary_dim} dimensions of a head, and the config itself "
                f"{int(head_dim * share)}; it is one field"
            )
        if scaled.kind == "yarn" and optional_number(given, "attention_factor") is None:
            scaled = replace(scaled, attention_factor=1.0)
        return {"main": RopeSpec(bases["main"], scaled.rotary_dim), "compress": scaled}
    require_whole_sections(config, list(bases), "rope_theta", "partial_rotary_factor")
    found = {}
    for name, theta in bases.items():
        found[name] = rope(view, head_dim, theta, name)
        own = RopeSpec(theta, int(head_dim * share))
        stored = config.stores("rope_theta" if name == "main" else "compress_rope_theta")
        if (stored and found[name].theta != theta) or found[name].rotary_dim != own.rotary_dim:
            raise ModelError(
                f"the config's rope_parameters have another base or share of {name} than the config itself"
            )
    return found


def _mixer(
    config: Config, kind: str, rates: Mapping[str, int], ropes: Mapping[str, RopeSpec], eps: float
) -> CompressedAttention:
    compression = None
    if kind == HEAVY:
        compression = Compression(rate=rates[kind], overlaps=False)
    elif kind == SPARSE:
        compression = Compression(
            rate=rates[kind],
            overlaps=True,
            num_chosen=integer(config, "index_topk", 512),
            index_heads=integer(config, "index_n_heads", 64),
            index_dim=integer(config, "index_head_dim", 128),
        )
    return CompressedAttention(
        num_heads=integer(config, "num_attention_heads", 64),
        head_dim=integer(config, "head_dim", 512),
        window=integer(config, "sliding_window", 128),
        query_rank=integer(config, "q_lora_rank", 1024),
        num_groups=integer(config, "o_groups", 8),
        group_rank=integer(config, "o_lora_rank", 1024),
        eps=eps,
        rope=ropes["main" if compression is None else "compress"],
        compression=compression,
    )


def _ffns(config: Config, count: int) -> list[Experts]:
    """Raises ModelError."""
    kind, inner = limited_silu(config, "swiglu_limit"), integer(config, "moe_intermediate_size", 2048)
    scoring: Any = one_of(config, "scoring_func", "sqrtsoftplus", "softmax", "sigmoid")
    routing = Routing(
        integer(config, "num_experts_per_tok", 6),
        scoring,
        renormalise=True,
        scale=number(config, "routed_scaling_factor", 1.5),
    )
    mixture = Experts(
        integer(config, "n_routed_experts", 256),
        routing,
        inner,
        kind,
        shared_inner=inner,
        shared_gate=False,
        correction="vector",
    )
    hashed = replace(ExpertsByToken(**vars(mixture)), correction="no")
    given, first = config.get("mlp_layer_types"), integer(config, "num_hash_layers", 3)
    if given is None:
        given = ["hash_moe" if index < first else "moe" for index in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {"hash_moe", "moe"}:
        raise ModelError(f"the config's mlp_layer_types must be hash_moe or moe for each layer, got {given!r:.80}")
    return [hashed if each == "hash_moe" else mixture for each in given[:count]]


FAMILY = Family(
    ("DeepseekV4ForCausalLM",),
    build,
    ignored={
        "num_key_value_heads": "all heads have one key",
        "num_nextn_predict_layers": "of further layers, which are not run",
        "intermediate_size": "moe_intermediate_size says it",
    },
    assumes={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc",),
        "expert_dtype": ("fp4", "fp8"),
    },
)
