"""GGUF architectures without experts, by the name in a file's `general.architecture`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.checkpoints.sources.gguf.architecture import (
    LONG_FACTORS,
    SHORT_FACTORS,
    Fields,
    GGUFArchitecture,
)
from headrace.ipc.failure import ModelError

Config = Mapping[str, Any]
GEMMA_27B_LAYERS = MappingProxyType({"gemma2": 46, "gemma3_text": 62})
GEMMA2_DEFAULTS = (4096, 50.0, 30.0)
"""The sliding window and the soft caps of scores and logits of Gemma 2 files that do not have them."""
BAICHUAN_13B_LAYERS = 40
EXAONE_32B_LAYERS, EXAONE_32B_WINDOW = 64, 4096
GEMMA4_CAP = 30.0
"""llama.cpp's cap of Gemma 4's logits, for files that do not have it."""
ALIBI_BIAS = 8.0
"""llama.cpp's constant for architectures whose files have no `attention.max_alibi_bias`."""
# Parameters that MiniCPM 3's files do not have, nor MiniCPM's older ones; llama.cpp's code has them as constants.
MINICPM3 = MappingProxyType({"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256})


def biases(fields: Fields, config: Config) -> dict[str, Any]:
    """Which projections have biases, in the fields of Llama's config."""
    return {
        "hidden_act": "silu",
        "attention_bias": fields.holds("blk.0.attn_q.bias"),
        "attention_out_bias": fields.holds("blk.0.attn_output.bias"),
        "mlp_bias": fields.holds("blk.0.ffn_down.bias"),
    }


def query_biases(fields: Fields, config: Config) -> dict[str, Any]:
    return {"attention_bias": fields.holds("blk.0.attn_q.bias")}


def granite(fields: Fields, config: Config) -> dict[str, Any]:
    fields.expect("rope.scaling.finetuned", True)  # by false, llama.cpp leaves out the rotation of this architecture
    return biases(fields, config) | {
        "attention_multiplier": fields.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.number("logit_scale"),
    }


def window(fields: Fields, config: Config) -> dict[str, Any]:
    return {"sliding_window": fields.integer("attention.sliding_window", 0) or None}


def _starcoder2(fields: Fields, config: Config) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": fields.holds("blk.0.attn_q.bias")}


def _stablelm(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        "use_parallel_residual": fields.flag("use_parallel_residual", False),
        "use_qkv_bias": fields.holds("blk.0.attn_q.bias"),
    }


def _command_r(fields: Fields, config: Config) -> dict[str, Any]:
    return {"logit_scale": fields.number("logit_scale"), "use_qk_norm": fields.holds("blk.0.attn_q_norm.weight")}


def layers_with_windows(fields: Fields, config: Config) -> dict[str, Any]:
    return window(fields, config) | fields.sliding_layers(config["num_hidden_layers"])


def always_with_windows(fields: Fields, config: Config) -> dict[str, Any]:
    """Of an architecture of which every model has a window, whose size a file must therefore say."""
    return layers_with_windows(fields, config) | {"sliding_window": fields.count("attention.sliding_window")}


def _cohere2(fields: Fields, config: Config) -> dict[str, Any]:
    return always_with_windows(fields, config) | {"logit_scale": fields.number("logit_scale")}


def _seed_oss(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        "attention_bias": fields.holds("blk.0.attn_q.bias"),
        "attention_out_bias": fields.holds("blk.0.attn_output.bias"),
        "mlp_bias": fields.holds("blk.0.ffn_down.bias"),
    }


def _squared_relu(fields: Fields, config: Config) -> dict[str, Any]:
    return biases(fields, config) | {"hidden_act": "relu2"}


def _deci(fields: Fields, config: Config) -> dict[str, Any]:
    """Sizes of 0 say that a layer has no attention or no FFN. Raises ModelError."""
    count, inner = config["num_hidden_layers"], config["intermediate_size"]
    heads, key_heads = (fields.integers(f"attention.{each}") for each in ("head_count", "head_count_kv"))
    lists = ([each] * count if isinstance(each, int) else each for each in (heads, key_heads, inner))
    layers, blocks = list(zip(*lists, strict=True)), []
    for index, (own, keys, size) in enumerate(layers):
        if own and not keys:
            raise ModelError(
                f"{fields.header.path}: layer {index} has a linear layer in the place of attention (head_count {own}, "
                "head_count_kv 0), which is not supported"
            )
        attention = {"n_heads_in_group": own // keys} if keys else {"no_op": True}
        blocks.append({"attention": attention, "ffn": {"intermediate_size": size} if size else {"no_op": True}})
    return {
        "block_configs": blocks,
        "intermediate_size": None,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "attention_bias": fields.any_layer_holds("attn_q.bias"),
        "attention_out_bias": fields.any_layer_holds("attn_output.bias"),
        "mlp_bias": fields.any_layer_holds("ffn_down.bias"),
    }


def _clipped(fields: Fields, config: Config) -> dict[str, Any]:
    return {"clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None}


def _olmo2(fields: Fields, config: Config) -> dict[str, Any]:
    """OLMo 3 files have OLMo 2's architecture name, and a sliding window."""
    found = layers_with_windows(fields, config)
    if found["sliding_window"] is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} | found


def _plamo3(fields: Fields, config: Config) -> dict[str, Any]:
    """Layers with windows have a rotation of their own. Files without a window have none."""
    found = layers_with_windows(fields, config)
    if found["sliding_window"] is None:
        return {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return found | {"rope_local_theta": fields.number("rope.freq_base_swa", 10_000.0)}


def _exaone4(fields: Fields, config: Config) -> dict[str, Any]:
    """The 32B has windows, of llama.cpp's size where the file does not say; the 1.2B has none."""
    found = layers_with_windows(fields, config)
    if not fields.has("attention.sliding_window") and config["num_hidden_layers"] == EXAONE_32B_LAYERS:
        return found | {"sliding_window": EXAONE_32B_WINDOW}
    if found["sliding_window"] is None:
        return found | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return found


def _gemma(fields: Fields, config: Config) -> dict[str, Any]:
    """Adds what only llama.cpp has, not the file: the query scale and the rotary base of Gemma 3's sliding layers."""
    layers = config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    is_27b = layers == GEMMA_27B_LAYERS[config["model_type"]]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
    }
    if config["model_type"] == "gemma3_text":
        found["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
    is_second = config["model_type"] == "gemma2"
    window, *caps = GEMMA2_DEFAULTS if is_second else (0, 0.0, 0.0)
    for key, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True):
        found[key] = fields.number(key, default) or None
    found |= fields.sliding_layers(layers)
    size = fields.integer("attention.sliding_window", window)
    if size:
        found["sliding_window"] = size
    else:
        found["layer_types"] = ["full_attention"] * layers
    return found


def _gemma3n(fields: Fields, config: Config) -> dict[str, Any]:
    """Takes sizes without a metadata key from tensors. The file has each layer's sparsity as a number of standard
    deviations above the mean (minus infinity: dense); the config has it as the fraction that becomes 0."""
    least = fields.floats("activation_sparsity_scale") or [-math.inf] * config["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": fields.rows("per_layer_token_embd.weight"),
        "laurel_rank": fields.rows("blk.0.laurel_l.weight"),
        "altup_num_inputs": fields.integer("altup.num_inputs"),
        "altup_active_idx": fields.integer("altup.active_idx"),
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers"),
        # The file's deviations are float32, so seven digits of the fraction are significant.
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 7) for each in least],
        **fields.sliding_layers(config["num_hidden_layers"]),
        "sliding_window": fields.integer("attention.sliding_window"),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
    }


def _gemma4(fields: Fields, config: Config) -> dict[str, Any]:
    """Full attention has larger heads, and other heads of keys where these are values too. The tensor of rotary
    factors says how many dimensions turn in it."""
    layers = config["num_hidden_layers"]
    types = fields.sliding_layers(layers).get("layer_types", [])
    if len(types) != layers:
        said = f"{fields.prefix}.attention.sliding_window_pattern has {len(types)} of {layers} layers"
        raise ModelError(f"{fields.header.path}: {said}")
    full, sliding = (types.index(kind) if kind in types else None for kind in ("full_attention", "sliding_attention"))
    for key, value in (("scaling.factor", 1.0), ("scale_linear", 1.0), ("dimension_count", config["head_dim"])):
        fields.expect(f"rope.{key}", value)
    if types[-1] != "full_attention":
        raise ModelError(f"{fields.header.path}: the attention of the last layer has a window; it is full in Gemma 4")
    heads = fields.integers("attention.head_count_kv", config["num_attention_heads"])
    of_layer = heads if isinstance(heads, list) else [heads] * layers
    inner = config["intermediate_size"]
    sizes = inner if isinstance(inner, list) else [inner]
    table, factors = "per_layer_token_embd.weight", fields.header.tensors.get("rope_freqs.weight")
    if factors is None or fields.holds(LONG_FACTORS) or fields.holds(SHORT_FACTORS):
        raise ModelError(f"{fields.header.path}: the dimensions that rotate are those of rope_freqs.weight alone")
    turned = factors.data.reshape(-1).view("<f4")
    rope = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": float((turned == 1.0).mean()),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)},
    }
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "sliding_window": fields.integer("attention.sliding_window"),
        "head_dim": fields.integer("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": of_layer[layers - 1 if sliding is None else sliding],
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": fields.rows(table) if fields.holds(table) else config["vocab_size"],
        "final_logit_softcapping": fields.number("final_logit_softcapping", GEMMA4_CAP) or None,
        "rope_parameters": rope,
        "rope_scaling": None,
        "rope_theta": None,
        "partial_rotary_factor": None,
        "enable_moe_block": (experts := fields.integer("expert_count", 0)) > 0,
    }
    if max(sizes) not in (min(sizes), 2 * min(sizes)):
        raise ModelError(f"{fields.header.path}: the inner sizes {sizes} are not one, and its double")
    if full is not None and not fields.holds(f"blk.{full}.attn_v.weight"):
        found |= {"attention_k_eq_v": True, "num_global_key_value_heads": of_layer[full]}
    if experts:  # under its own name alone
        names = dict.fromkeys(
            ("num_experts_per_tok", "moe_k", "num_local_experts", "n_routed_experts", "moe_num_experts")
        )
        found |= {**names, "top_k_experts": fields.integer("expert_used_count")}
    return found


def _apertus(fields: Fields, config: Config) -> dict[str, Any]:
    """The activation's slopes are read as weights; its other two parameters are the same in every model."""
    for name, value in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        found = np.asarray(fields.header.metadata.get(name, value), np.float64)
        if not np.allclose(found, value, rtol=1e-3):
            raise ModelError(f"{fields.header.path}: the metadata key {name} is {found.tolist()}; {value} is computed")
    return query_biases(fields, config)


def _gpt2(fields: Fields, config: Config) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"]}


def _neox(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        "use_parallel_residual": fields.flag("use_parallel_residual", True),
        "attention_bias": fields.holds("blk.0.attn_qkv.bias"),
    }


def _falcon(fields: Fields, config: Config) -> dict[str, Any]:
    """The old decoder architecture has one key/value head; of the new one, the large models have two norms per layer
    and the 11B has one."""
    groups = config["num_key_value_heads"]
    return {
        "multi_query": groups == 1,
        "num_kv_heads": groups,
        "new_decoder_architecture": groups > 1,
        "num_ln_in_parallel_attn": 2 if fields.holds("blk.0.attn_norm_2.weight") else 1,
        "parallel_attn": True,
        "bias": fields.holds("blk.0.attn_qkv.bias"),
        "ffn_hidden_size": config["intermediate_size"],
    }


def _mpt(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        "attn_config": {
            "alibi": fields.number("attention.max_alibi_bias", 0.0) > 0,
            "alibi_bias_max": fields.number("attention.max_alibi_bias", 8.0),
            "clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None,
        },
        "expansion_ratio": config["intermediate_size"] / config["hidden_size"],
    }


def _bloom(fields: Fields, config: Config) -> dict[str, Any]:
    fields.expect("attention.max_alibi_bias", ALIBI_BIAS)
    return {}


def _baichuan(fields: Fields, config: Config) -> dict[str, Any]:
    """Only the 13B has ALiBi. `rope.dimension_count` does not tell, since its files have it too."""
    fields.expect("attention.max_alibi_bias", ALIBI_BIAS)
    is_13b = config["num_hidden_layers"] == BAICHUAN_13B_LAYERS
    return {"architectures": ["BaichuanForCausalLM" if is_13b else "BaiChuanForCausalLM"]}


def _internlm2(fields: Fields, config: Config) -> dict[str, Any]:
    return {"bias": fields.holds("blk.0.attn_q.bias")}


def _orion(fields: Fields, config: Config) -> dict[str, Any]:
    return {"rms_norm_eps": fields.number("attention.layer_norm_epsilon")}  # the name that configs have for it


def _chatglm(fields: Fields, config: Config) -> dict[str, Any]:
    """Also GLM 4 as transformers names it, whose files have queries, keys and values apart."""
    fields.integer("rope.dimension_count")
    fields.expect("rope.dimension_count", config["head_dim"] // 2)
    return {
        **dict.fromkeys(("rope_theta", "partial_rotary_factor", "num_key_value_heads")),
        "rope_ratio": config["rope_theta"] / 10_000.0,
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "add_qkv_bias": fields.holds("blk.0.attn_qkv.bias") or fields.holds("blk.0.attn_q.bias"),
    }


def _minicpm(fields: Fields, config: Config) -> dict[str, Any]:
    depth, default = math.sqrt(config["num_hidden_layers"]), MINICPM3
    return biases(fields, config) | {
        "scale_emb": fields.number("embedding_scale", default["scale_emb"]),
        "scale_depth": fields.number("residual_scale", default["scale_depth"] / depth) * depth,
        "logits_scaling": fields.number("logit_scale", config["hidden_size"] / default["dim_model_base"]),
    }


def _minicpm3(fields: Fields, config: Config) -> dict[str, Any]:
    rope_dim, num_heads = fields.integer("rope.dimension_count"), config["num_attention_heads"]
    nope_dim, up = (
        fields.integer("attention.key_length") - rope_dim,
        fields.header.tensors.get("blk.0.attn_kv_b.weight"),
    )
    return {
        **MINICPM3,
        "q_lora_rank": fields.integer("attention.q_lora_rank"),
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": 0 if up is None else up.shape[0] // num_heads - nope_dim,
        "partial_rotary_factor": 1.0,
    }


def hunyuan(fields: Fields, config: Config) -> dict[str, Any]:
    """The rotary base is stretched in the file already, beside the length that this makes."""
    if config.get("rope_scaling") is None:
        fields.has("rope.scaling.original_context_length")
    return biases(fields, config) | {"use_qk_norm": fields.holds("blk.0.attn_q_norm.weight")}


def _mistral3(fields: Fields, config: Config) -> dict[str, Any]:
    """Ministral 3, whose queries grow beyond the context before YaRN; without that, Mistral 3's language model."""
    found: dict[str, Any] = {"sliding_window": None}
    growth, scaling = fields.number("attention.temperature_scale", 0.0), config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        fields.expect("rope.scaling.attn_factor", 1.0)
        original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
        scaling = {**scaling, "original_max_position_embeddings": original}
        if all_dim := fields.number("rope.scaling.yarn_log_multiplier", 0.0):
            scaling |= {"mscale": 1.0, "mscale_all_dim": all_dim}
        found["rope_scaling"] = scaling | ({"llama_4_scaling_beta": growth} if growth else {})
    elif growth:
        fields.expect("attention.temperature_scale", 0.0)
    return found if growth else found | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def of_text(fields: Fields, config: Config) -> dict[str, Any]:
    """A language model beside a vision tower that is in another file; this says which of its layers read images."""
    fields.has("n_deepstack_layers")
    return {}


GEMMA4_NAMES = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "attn_k": "self_attn.k_proj",  # of layers that read another's, which do not need their own
    "attn_v": "self_attn.v_proj",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "apertus": GGUFArchitecture("ApertusForCausalLM", "apertus", extra=_apertus),
        "arcee": GGUFArchitecture("ArceeForCausalLM", "arcee", permuted=True, extra=_squared_relu),
        "baichuan": GGUFArchitecture(
            "BaichuanForCausalLM", "baichuan", permuted=True, extra=_baichuan, key_heads="all"
        ),
        "bloom": GGUFArchitecture("BloomForCausalLM", "bloom", extra=_bloom, layer_norms=True, key_heads="all"),
        "chatglm": GGUFArchitecture(
            "ChatGLMModel",
            "chatglm",
            extra=_chatglm,
            names={f"attn_{name[0]}": f"self_attention.{name}" for name in ("query", "key", "value")},
        ),
        "cohere2": GGUFArchitecture("Cohere2ForCausalLM", "cohere2", extra=_cohere2, layer_norms=True),
        "command-r": GGUFArchitecture("CohereForCausalLM", "cohere", extra=_command_r, layer_norms=True),
        "deci": GGUFArchitecture("DeciLMForCausalLM", "deci", permuted=True, key_heads_differ=True, extra=_deci),
        "ernie4_5": GGUFArchitecture("Ernie4_5ForCausalLM", "ernie4_5"),
        "exaone": GGUFArchitecture("ExaoneForCausalLM", "exaone"),
        "exaone4": GGUFArchitecture("Exaone4ForCausalLM", "exaone4", extra=_exaone4),
        "falcon": GGUFArchitecture("FalconForCausalLM", "falcon", extra=_falcon, layer_norms=True),
        "gemma": GGUFArchitecture("GemmaForCausalLM", "gemma", offset_norms=True),
        "gemma2": GGUFArchitecture("Gemma2ForCausalLM", "gemma2", offset_norms=True, extra=_gemma),
        "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", offset_norms=True, extra=_gemma),
        "gemma3n": GGUFArchitecture("Gemma3nForCausalLM", "gemma3n_text", extra=_gemma3n),
        "gemma4": GGUFArchitecture(
            "Gemma4ForCausalLM",
            "gemma4_text",
            extra=_gemma4,
            is_mixture=True,
            may_be_dense=True,
            always_renormalises=True,
            key_heads_differ=True,
            names=GEMMA4_NAMES,
        ),
        "glm4": GGUFArchitecture("Glm4ForCausalLM", "glm4", extra=query_biases),
        "gpt2": GGUFArchitecture("GPT2LMHeadModel", "gpt2", extra=_gpt2, layer_norms=True, key_heads="all"),
        "gptneox": GGUFArchitecture("GPTNeoXForCausalLM", "gpt_neox", extra=_neox, layer_norms=True, key_heads="all"),
        "granite": GGUFArchitecture("GraniteForCausalLM", "granite", permuted=True, extra=granite),
        "hunyuan-dense": GGUFArchitecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", extra=hunyuan),
        "internlm2": GGUFArchitecture("InternLM2ForCausalLM", "internlm2", permuted=True, extra=_internlm2),
        "jais2": GGUFArchitecture("Jais2ForCausalLM", "jais2", extra=_squared_relu, layer_norms=True),
        "llama": GGUFArchitecture("LlamaForCausalLM", "llama", permuted=True, extra=biases),
        "minicpm": GGUFArchitecture("MiniCPMForCausalLM", "minicpm", permuted=True, extra=_minicpm),
        "minicpm3": GGUFArchitecture("MiniCPM3ForCausalLM", "minicpm3", extra=_minicpm3, key_heads="one"),
        "mistral3": GGUFArchitecture("Ministral3ForCausalLM", "ministral3", permuted=True, extra=_mistral3),
        "mpt": GGUFArchitecture("MptForCausalLM", "mpt", extra=_mpt, layer_norms=True, key_heads="all"),
        "nemotron": GGUFArchitecture(
            "NemotronForCausalLM", "nemotron", offset_norms=True, extra=_squared_relu, layer_norms=True
        ),
        "olmo": GGUFArchitecture("OlmoForCausalLM", "olmo", permuted=True, extra=_clipped, layer_norms=True),
        "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2", extra=_olmo2),
        "orion": GGUFArchitecture("OrionForCausalLM", "orion", extra=_orion, layer_norms=True),
        "pangu-embedded": GGUFArchitecture("PanguEmbeddedForCausalLM", "PanguEmbedded", extra=_internlm2),
        "phi2": GGUFArchitecture("PhiForCausalLM", "phi", layer_norms=True),
        "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", extra=window),
        "plamo3": GGUFArchitecture("Plamo3ForCausalLM", "plamo3", offset_norms=True, extra=_plamo3),
        "qwen": GGUFArchitecture("QWenLMHeadModel", "qwen", key_heads="all"),
        "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
        "qwen2vl": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", extra=of_text),
        "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3"),
        "qwen3vl": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", extra=of_text),
        "seed_oss": GGUFArchitecture("SeedOssForCausalLM", "seed_oss", extra=_seed_oss),
        "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", permuted=True, extra=biases),
        "stablelm": GGUFArchitecture("StableLmForCausalLM", "stablelm", extra=_stablelm, layer_norms=True),
        "starcoder": GGUFArchitecture(
            "GPTBigCodeForCausalLM", "gpt_bigcode", extra=_gpt2, layer_norms=True, key_heads="one"
        ),
        "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM", "starcoder2", extra=_starcoder2, layer_norms=True),
        "xverse": GGUFArchitecture("XverseForCausalLM", "xverse", permuted=True, extra=biases),
    }
)
