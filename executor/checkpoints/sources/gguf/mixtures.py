"""GGUF architectures with experts, by the name in a file's `general.architecture`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.architecture import Fields, GGUFArchitecture
from headrace.executor.checkpoints.sources.gguf.dense import (
    Config,
    always_with_windows,
    granite,
    hunyuan,
    of_text,
    query_biases,
    window,
)
from headrace.executor.checkpoints.sources.gguf.two_attentions import mimo2, step35
from headrace.executor.models.families._config import longrope_attention_factor
from headrace.ipc.failure import ModelError

SIGMOID, SOFTMAX_OF_CHOSEN = 2, 3
"""Values of `expert_gating_func`."""
DEEPSEEK_GROUPS = MappingProxyType({160: (8, 3), 256: (8, 4)})
"""(groups of experts, groups chosen) of DeepSeek V2 and V3 by their number of experts, for older files, which lack
them."""
PHIMOE_ATTENTION_FACTOR = 1.243163121016122
"""LongRoPE's attention factor of the published model. Files have LongRoPE's default instead."""
LLAMA4_CHUNK = 8192
"""Llama 4's chunk size, which llama.cpp's code has as a constant."""
MAVERICK_EXPERTS = 128
"""A Llama 4 with this number of experts does not norm queries and keys, which files do not tell."""
MISTRAL_4_GROWTH = 0.1
"""How fast queries grow beyond the context before YaRN in Mistral 4, which its converter does not write."""


DBRX_LEFT_OUT = (
    *("rope_theta", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_experts_per_tok", "moe_k"),
)
"""Common fields of a config that DBRX's has in sections."""


def mixture(fields: Fields, config: Config, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Config fields that all mixtures have, under the names that several families use."""
    fields.expect("expert_gating_func", *architecture.gating)
    count, chosen = fields.integer("expert_count"), fields.integer("expert_used_count")
    found: dict[str, Any] = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), count),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), chosen),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", config["intermediate_size"]),
    }
    if architecture.routes_in_groups:
        found |= {
            "n_shared_experts": fields.integer("expert_shared_count", 0),
            "routed_scaling_factor": fields.number("expert_weights_scale", 0.0) or 1.0,
            "first_k_dense_replace": fields.integer("leading_dense_block_count", 0),
            "n_group": (groups := fields.integer("expert_group_count", 1)),
            "topk_group": fields.integer("expert_group_used_count", None if groups > 1 else 1),
        }
    if architecture.always_renormalises is not None:
        fields.expect("expert_weights_norm", architecture.always_renormalises)
        return found
    return found | {"norm_topk_prob": fields.flag("expert_weights_norm", architecture.renormalised)}


def _qwen2(fields: Fields, config: Config) -> dict[str, Any]:
    shared = fields.header.tensors.get("blk.0.ffn_up_shexp.weight")
    length = fields.integer("expert_shared_feed_forward_length", 0 if shared is None else shared.shape[0])
    return {"shared_expert_intermediate_size": length, "qkv_bias": fields.holds("blk.0.attn_q.bias")}


def _gpt_oss(fields: Fields, config: Config) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    rope = {} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}
    return query_biases(fields, config) | always_with_windows(fields, config) | rope


def _deepseek2(fields: Fields, config: Config) -> dict[str, Any]:
    """DeepSeek V2, or V3 and models with its architecture, which choose experts by corrected scores."""
    if fields.has("attention.temperature_scale"):  # Mistral's own converter writes Mistral Large 3 so
        return _mistral4(fields, config) | {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    found = _latent(fields) | _yarn_of_latent(fields, config)
    if not fields.has("expert_group_count"):
        groups, chosen = DEEPSEEK_GROUPS.get(fields.integer("expert_count"), (1, 1))
        found |= {"n_group": groups, "topk_group": chosen}
    is_grouped = found.get("n_group", fields.integer("expert_group_count", 1)) > 1
    if fields.any_layer_holds("exp_probs_b.bias"):
        fields.expect("expert_gating_func", 0, SIGMOID)
    if fields.integer("expert_gating_func", 0) == SIGMOID or fields.any_layer_holds("exp_probs_b.bias"):
        return found | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return found | {"topk_method": "group_limited_greedy" if is_grouped else "greedy"}


def _latent(fields: Fields) -> dict[str, Any]:
    rope_dim = fields.integer("rope.dimension_count")
    return {
        "q_lora_rank": fields.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": _of_a_head(fields, "key") - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": _of_a_head(fields, "value"),
        "partial_rotary_factor": 1.0,
    }


def _yarn_of_latent(fields: Fields, config: Config) -> dict[str, Any]:
    """The key has a tenth of mscale_all_dim, the factor of queries and keys; mscale is assumed to equal that."""
    scaling = config.get("rope_scaling")
    if scaling is None or not fields.has("rope.scaling.yarn_log_multiplier"):
        return {}
    fields.expect("rope.scaling.attn_factor", 1.0)
    scale = fields.number("rope.scaling.yarn_log_multiplier") * 10
    return {"rope_scaling": {**scaling, "mscale": scale, "mscale_all_dim": scale}}


def _mistral4(fields: Fields, config: Config) -> dict[str, Any]:
    """Mistral 4, whose queries grow beyond the context before YaRN."""
    scaling = _yarn_of_latent(fields, config).get("rope_scaling", config.get("rope_scaling"))
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ModelError(f"{fields.header.path}: {fields.prefix}.rope.scaling.type must be yarn")
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    growth = fields.number("attention.temperature_scale", MISTRAL_4_GROWTH)
    fields.expect("attention.temperature_length", original)
    fields.expect("expert_gating_func", 0, 1)
    grown = {"llama_4_scaling_beta": growth, "original_max_position_embeddings": original}
    return _latent(fields) | {"rope_scaling": {**scaling, **grown}}


def _glm_dsa(fields: Fields, config: Config) -> dict[str, Any]:
    """GLM 5. Which layers have an index of their own the tensors say; newer files list them as well."""
    own = [fields.holds(f"blk.{index}.indexer.attn_k.weight") for index in range(config["num_hidden_layers"])]
    fields.expect_flags("attention.indexer.types", own)
    return _latent(fields) | {
        "index_n_heads": fields.integer("attention.indexer.head_count"),
        "index_head_dim": fields.integer("attention.indexer.key_length"),
        "index_topk": fields.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if each else "shared" for each in own],
    }


def _of_a_head(fields: Fields, kind: str) -> int:
    """Size of a head's key or value. Files made for the compressed cache have it under a name with _mla, and the
    compressed size under the plain name."""
    own = f"attention.{kind}_length_mla"
    return fields.integer(own if fields.has(own) else f"attention.{kind}_length")


def _glm4(fields: Fields, config: Config) -> dict[str, Any]:
    return query_biases(fields, config) | {"use_qk_norm": fields.holds("blk.0.attn_q_norm.weight")}


def _dots1(fields: Fields, config: Config) -> dict[str, Any]:
    return query_biases(fields, config) | {"sliding_window": None}  # its class has one, of no published model


def _ernie(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        "moe_layer_start_index": fields.integer("leading_dense_block_count", 0),
        "moe_layer_interval": fields.integer("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": fields.integer("expert_shared_count", 0),
        "use_bias": fields.holds("blk.0.attn_q.bias"),
    }


def _exaone_moe(fields: Fields, config: Config) -> dict[str, Any]:
    inner = fields.integer("expert_feed_forward_length")
    count = fields.integer("expert_shared_count", 0)
    fields.expect("expert_shared_feed_forward_length", inner * count)
    for key in ("scaling.factor", "scale_linear"):
        fields.expect(f"rope.{key}", 1.0)
    return always_with_windows(fields, config) | {"num_shared_experts": count}


def _dbrx(fields: Fields, config: Config) -> dict[str, Any]:
    """The published config has its own names, in sections."""
    attention = {
        "clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None,
        "kv_n_heads": fields.count("attention.head_count_kv"),
        "rope_theta": config["rope_theta"],
    }
    ffn = {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": fields.integer("expert_count"),
        "moe_top_k": fields.integer("expert_used_count"),
        "moe_normalize_expert_weights": 1,
    }
    names = {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    }
    left_out = dict.fromkeys(DBRX_LEFT_OUT)
    return left_out | {
        "attn_config": attention,
        "ffn_config": ffn,
        **{own: config[name] for own, name in names.items()},
    }


def _llama4(fields: Fields, config: Config) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", LLAMA4_CHUNK)  # 0: no layer has chunks, and all rotate
    if window != LLAMA4_CHUNK:
        fields.expect("attention.sliding_window", 0)
    layers = config["num_hidden_layers"]
    plain = {} if window else {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    return (
        query_biases(fields, config)
        | plain
        | {
            "intermediate_size": fields.integer("expert_feed_forward_length"),
            "intermediate_size_mlp": config["intermediate_size"],
            "interleave_moe_layer_step": fields.integer("interleave_moe_layer_step"),
            "use_qk_norm": fields.integer("expert_count") != MAVERICK_EXPERTS,
        }
    )


def _phimoe(fields: Fields, config: Config) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    rope = {}
    if scaling is not None and scaling["rope_type"] == "longrope":
        original = scaling["original_max_position_embeddings"]
        default = longrope_attention_factor(config["max_position_embeddings"] / original, original)
        written = scaling.get("attention_factor", default)
        own = PHIMOE_ATTENTION_FACTOR if math.isclose(written, default, rel_tol=1e-4) else written
        rope = {"rope_scaling": {**scaling, "attention_factor": own}}
    head = {"lm_head_bias": fields.holds("output.bias")}
    return query_biases(fields, config) | window(fields, config) | head | rope


def _hunyuan(fields: Fields, config: Config) -> dict[str, Any]:
    count = fields.integer("expert_shared_count", 1)
    fields.expect("expert_shared_feed_forward_length", count * config["intermediate_size"])
    return hunyuan(fields, config) | {"mlp_bias": None, "num_shared_expert": count}


def _ling(fields: Fields, config: Config) -> dict[str, Any]:
    fused = fields.holds("blk.0.attn_qkv.bias")
    return {
        "use_qkv_bias": fused or fields.holds("blk.0.attn_q.bias"),
        "use_bias": fields.holds("blk.0.attn_output.bias"),
    }


def _ling2(fields: Fields, config: Config) -> dict[str, Any]:
    inner = fields.integer("expert_feed_forward_length") * fields.integer("expert_shared_count", 0)
    fields.expect("expert_shared_feed_forward_length", inner)
    return _ling(fields, config) | {"use_qk_norm": fields.holds("blk.0.attn_q_norm.weight")}


_experts = functools.partial(GGUFArchitecture, is_mixture=True)
_deepseek_experts = functools.partial(_experts, routes_in_groups=True, gating=(0, SIGMOID))
"""Its experts are chosen as DeepSeek-V3's are."""
MIXTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "bailingmoe": _experts(
            "BailingMoeForCausalLM",
            "bailing_moe",
            permuted=True,
            extra=_ling,
            routes_in_groups=True,
            names={f"attn_{each}": f"attention.{each}_proj" for each in "qkv"},
        ),
        "bailingmoe2": _experts(
            "BailingMoeV2ForCausalLM", "bailing_moe_v2", extra=_ling2, routes_in_groups=True, gating=(SIGMOID,)
        ),
        "deepseek": _experts(
            "DeepseekForCausalLM", "deepseek", permuted=True, routes_in_groups=True, always_renormalises=False
        ),
        "deepseek2": _experts(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            extra=_deepseek2,
            routes_in_groups=True,
            gating=(0, 1, SIGMOID),
            key_heads="one",
        ),
        "dbrx": _experts("DbrxForCausalLM", "dbrx", extra=_dbrx, always_renormalises=True, layer_norms=True),
        "dots1": _deepseek_experts("Dots1ForCausalLM", "dots1", extra=_dots1),
        "ernie4_5-moe": _experts("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", extra=_ernie, always_renormalises=True),
        "exaone-moe": _deepseek_experts("ExaoneMoeForCausalLM", "exaone_moe", extra=_exaone_moe),
        "glm-dsa": _deepseek_experts("GlmMoeDsaForCausalLM", "glm_moe_dsa", extra=_glm_dsa, key_heads="one"),
        "glm4moe": _deepseek_experts("Glm4MoeForCausalLM", "glm4_moe", extra=_glm4),
        "gpt-oss": _experts(
            "GptOssForCausalLM", "gpt_oss", extra=_gpt_oss, always_renormalises=True, gating=(0, 1, SOFTMAX_OF_CHOSEN)
        ),
        "granitemoe": _experts(
            "GraniteMoeForCausalLM", "granitemoe", permuted=True, extra=granite, always_renormalises=True
        ),
        "hunyuan-moe": _experts("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", extra=_hunyuan, always_renormalises=True),
        "llama4": _experts(
            "Llama4ForCausalLM", "llama4_text", extra=_llama4, always_renormalises=False, gating=(0, SIGMOID)
        ),
        "mimo2": _deepseek_experts(
            "MiMoV2FlashForCausalLM",
            "mimo_v2_flash",
            extra=mimo2,
            always_renormalises=True,
            key_heads_differ=True,
            names={"attn_sinks.weight": "self_attn.attention_sink_bias"},
        ),
        "mistral4": _experts(
            "Mistral4ForCausalLM", "mistral4", extra=_mistral4, routes_in_groups=True, key_heads="one"
        ),
        "minimax-m2": _experts("MiniMaxM2ForCausalLM", "minimax_m2", always_renormalises=True, gating=(0, SIGMOID)),
        "olmoe": _experts("OlmoeForCausalLM", "olmoe"),
        "phimoe": _experts("PhimoeForCausalLM", "phimoe", extra=_phimoe, always_renormalises=False),
        "qwen2moe": _experts("Qwen2MoeForCausalLM", "qwen2_moe", extra=_qwen2),
        "qwen3moe": _experts("Qwen3MoeForCausalLM", "qwen3_moe", renormalised=True),
        "qwen3vlmoe": _experts("Qwen3MoeForCausalLM", "qwen3_moe", extra=of_text, renormalised=True),
        "step35": _experts(
            "Step3p5ForCausalLM", "step3p5", offset_norms=True, extra=step35, gating=(0, SIGMOID), heads_differ=True
        ),
    }
)
MIXTRAL = _experts("MixtralForCausalLM", "mixtral", permuted=True, always_renormalises=True)
"""The architecture of files that have experts and the architecture name llama."""
