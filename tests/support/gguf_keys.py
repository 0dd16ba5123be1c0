"""Metadata of GGUF files, as llama.cpp's converter writes it from a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import torch

Config = Mapping[str, Any]
EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
PERMUTED = (
    "llama", "smollm3", "arcee", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "olmo",
    "baichuan", "internlm2", "minicpm", "deepseek", "mistral3", "xverse", "bailingmoe", "exaone", "deci",
)  # fmt: skip
LATENT = ("deepseek2", "glm-dsa", "minicpm3", "kimi-linear", "mistral4")
ONE_KEY_HEAD = ("deepseek2", "glm-dsa", "mistral4", "starcoder")
OF_KINDS = ("mimo2", "step35")
"""Whose layers with windows have other heads and another rotation."""
OWN_HEADS = ("qwen3", "qwen3vl", "gemma2", "gemma3", "gemma3n", "gpt-oss", "plamo2")
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
}


def file_architecture(arch: str, config: Config) -> str:
    """Nemotron-H's files have two names."""
    return "nemotron_h_moe" if arch == "nemotron_h" and "moe" in config["layers_block_type"] else arch


def first(config: Config, what: str) -> Any:
    """The value of a size under whichever of its names the config uses."""
    return next(config[key] for key in NAMES[what] if config.get(key) is not None)


def write_config(writer: gguf.GGUFWriter, arch: str, config: Config) -> int:
    """Writes the metadata and returns the number of layers."""
    if arch in ("mamba", "mamba2", "rwkv7"):
        {"mamba2": _write_mamba2, "mamba": _write_mamba, "rwkv7": _write_rwkv7}[arch](writer, config)
        _write_tokens(writer, config)
        return int(config["num_hidden_layers"])
    if arch.startswith("nemotron_h"):
        config = {**config, "num_hidden_layers": len(config["layers_block_type"])}
    if (published := PUBLISHED.get(arch)) is not None:
        config = {**config, **published(config)}
    layers, hidden, heads = first(config, "layers"), first(config, "hidden"), first(config, "heads")
    rope = config.get("attn_config") if arch == "dbrx" else config.get("rope_parameters")
    rope = (rope or {}).get("full_attention", rope or {})
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_block_count(layers)
    writer.add_context_length(_context(arch, config))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(_inner(arch, config, hidden))
    writer.add_head_count(_heads(config, heads))
    if arch not in ("gpt2", "mpt", "qwen"):
        writer.add_head_count_kv(1 if arch in ONE_KEY_HEAD else _groups(arch, config, heads))
    if arch in ("qwen", "exaone") or arch.startswith("nemotron_h"):
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    elif arch.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    elif arch == "orion":
        writer.add_layer_norm_eps(config["rms_norm_eps"])
    elif "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(next((config[key] for key in EPS if key in config), 1e-5))  # OLMo's
    if (theta := rope.get("rope_theta", config.get("rope_theta"))) is not None:
        writer.add_rope_freq_base(theta)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0
    if arch not in (*LATENT, *OF_KINDS, "gemma4") and (partial != 1.0 or arch == "jais2" or arch in PERMUTED):
        writer.add_rope_dimension_count(int(partial * head_dim))
    if arch not in (*LATENT, *OF_KINDS, "gemma4") and (arch in OWN_HEADS or head_dim * heads != hidden):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (
        "num_experts_per_tok" in config
        and arch not in ("minicpm3", "nemotron_h", "step35")
        and config.get("num_local_experts") != 0
    ):
        _write_experts(writer, arch, config)
    _write_scaling(writer, arch, rope)
    if arch in OWN:
        OWN[arch](writer, config)
    _write_tokens(writer, config)
    return int(layers)


def _write_tokens(writer: gguf.GGUFWriter, config: Config) -> None:
    for name in ("bos", "eos"):
        token_id = config.get(f"{name}_token_id")
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)


def _write_mamba2(writer: gguf.GGUFWriter, config: Config) -> None:
    inner = config["expand"] * config["hidden_size"]
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(inner // config["head_dim"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _write_mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _write_rwkv7(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_wkv_head_size(config["head_dim"])
    writer.add_decay_lora_rank(config["decay_low_rank_dim"])
    writer.add_iclr_lora_rank(config["a_low_rank_dim"])
    writer.add_value_residual_mix_lora_rank(config["v_low_rank_dim"])
    writer.add_gate_lora_rank(config["gate_low_rank_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(0)


def _context(arch: str, config: Config) -> int:
    if arch.startswith(("granitehybrid", "nemotron_h")) and config["model_type"] != "bamba":
        return 2**20
    return 2048 if arch == "falcon" else next((config[k] for k in NAMES["context"] if config.get(k)), 2048)


def _heads(config: Config, heads: int) -> int | list[int]:
    if config.get("block_configs"):
        return [heads if keys else 0 for keys in deci_heads(config)]
    return config.get("head_counts") or heads


def _lfm2_inner(config: Config) -> int:
    inner = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", False):
        return int(inner)
    step = config["block_multiple_of"]
    return int(-(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // step) * step)


def _inner(arch: str, config: Config, hidden: int) -> int | list[int]:
    if arch.startswith("lfm2"):
        return _lfm2_inner(config)
    if arch == "gemma4" and config["use_double_wide_mlp"]:
        inner, layers = config["intermediate_size"], config["num_hidden_layers"]
        first = layers - config["num_kv_shared_layers"]
        return [inner if layer < first else 2 * inner for layer in range(layers)]
    if arch == "dbrx":
        return int(config["ffn_config"]["ffn_hidden_size"])
    if arch == "deci" and (blocks := config.get("block_configs")):  # as the converter rounds them
        factors = [each["ffn"]["ffn_mult"] or 0.0 for each in blocks]
        return [-(-int(2 * each * hidden / 3) // 256) * 256 for each in factors]
    if arch == "gemma3n":
        return list(config["intermediate_size"])
    if arch.startswith("nemotron_h"):
        kind = "moe" if arch == "nemotron_h_moe" else "mlp"
        size = config["moe_intermediate_size" if kind == "moe" else "intermediate_size"]
        return [size if each == kind else 0 for each in config["layers_block_type"]]
    if arch in ("falcon", "bloom", "mpt", "gpt2", "starcoder"):
        return 4 * hidden
    return int(config["intermediate_size_mlp" if arch == "llama4" else "intermediate_size"])


def _groups(arch: str, config: Config, heads: int) -> int | list[int]:
    if arch.startswith("lfm2"):
        return [0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]]
    if arch == "deci":
        return deci_heads(config)
    if (attends := _attends(arch, config)) is not None:
        return [(1 if arch == "kimi-linear" else config["num_key_value_heads"]) if each else 0 for each in attends]
    if arch == "gemma4" and config["num_global_key_value_heads"] is not None:
        of = {
            "full_attention": config["num_global_key_value_heads"],
            "sliding_attention": config["num_key_value_heads"],
        }
        return [of[kind] for kind in config["layer_types"]]
    if arch == "dbrx":
        return int(config["attn_config"]["kv_n_heads"])
    if arch == "mimo2":
        own = config["num_key_value_heads"]
        slides = config.get("swa_num_key_value_heads") or 2 * own
        return [slides if kind == "sliding_attention" else own for kind in config["layer_types"]]
    if arch == "step35":
        return [config["num_attention_groups"]] * len(config["head_counts"])
    if arch == "falcon":
        return int(config.get("num_kv_heads") or 1) if config["new_decoder_architecture"] else 1
    return heads if arch in ("bloom", "phi2", "gptneox") else int(config.get("num_key_value_heads") or heads)


def deci_heads(config: Config) -> list[int]:
    """DeciLM's key/value heads of each layer; 0 without attention."""
    if (given := config.get("num_key_value_heads_per_layer")) is not None:
        return list(given)
    groups = [each["attention"]["n_heads_in_group"] for each in config["block_configs"]]
    return [config["num_attention_heads"] // each if each else 0 for each in groups]


def _attends(arch: str, config: Config) -> list[bool] | None:
    """Whether each layer of a hybrid has attention; None for other models."""
    layers = range(config["num_hidden_layers"]) if "num_hidden_layers" in config else ()
    if arch == "jamba":
        return [each % config["attn_layer_period"] == config["attn_layer_offset"] for each in layers]
    if config.get("model_type") == "bamba":
        return [each in config["attn_layer_indices"] for each in layers]
    if arch.startswith("nemotron_h"):
        return [kind in ("full_attention", "attention") for kind in config["layers_block_type"]]
    if arch == "plamo2":
        return [each % config["mamba_step"] == config["mamba_step"] // 2 for each in layers]
    if arch in ("granitehybrid", "kimi-linear"):
        return [kind in ("full_attention", "attention") for kind in config["layer_types"]]
    return None


def _write_ssd(writer: gguf.GGUFWriter, config: Config, heads: str, head_dim: str, state: str, groups: str) -> None:
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", config.get("conv_kernel")))
    writer.add_ssm_state_size(config[state])
    writer.add_ssm_group_count(config[groups])
    writer.add_ssm_inner_size(config[heads] * config[head_dim])
    writer.add_ssm_time_step_rank(config[heads])


def _granite_hybrid(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_ssd(writer, config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    writer.add_rope_scaling_finetuned(config["model_type"] == "bamba")
    if config["model_type"] != "bamba":
        _granite(writer, config)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _falcon_h1(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_ssd(writer, config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    writer.add_vocab_size(config["vocab_size"])


def _nemotron_h(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_ssd(writer, config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    writer.add_rope_scaling_finetuned(False)


def _nemotron_h_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _nemotron_h(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["moe_latent_size"] is not None:
        writer.add_moe_latent_size(config["moe_latent_size"])


def _jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _published_plamo2(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "head_dim": config["hidden_size_per_head"],
        "head_counts": [heads if each else 0 for each in _attends("plamo2", config) or ()],
    }


def _plamo2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["hidden_size_per_head"])
    writer.add_ssm_group_count(0)


def _plamo3(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    writer.add_rope_freq_base_swa(config["rope_local_theta"])


def _kimi_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    _latent(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _write_scaling(writer: gguf.GGUFWriter, arch: str, rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn" and arch in ("deepseek2", "mistral4") and rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_experts(writer: gguf.GGUFWriter, arch: str, config: Config) -> None:
    count = next(config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k))
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    with_inner = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "glm4moe", "deepseek2", "dots1", "lfm2moe", "qwen3next")
    if arch in (*with_inner, "glm-dsa", "mimo2", "mistral4", "qwen35moe", "bailingmoe", "bailingmoe2", "deepseek"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    elif arch in ("gpt-oss", "minimax-m2", "llama4"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    renormalised = config.get("norm_topk_prob", True)
    if arch == "mimo2":
        pass
    elif arch in ("glm4moe", "glm-dsa", "deepseek2", "dots1", "mistral4"):
        _write_deepseek_experts(writer, config)
    elif renormalised != (arch not in ("qwen2moe", "olmoe")):  # written only if not the default
        writer.add_expert_weights_norm(renormalised)
    if arch in ("qwen2moe", "qwen3next", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _write_deepseek_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    dense = config.get("first_k_dense_replace")
    if dense is None:
        dense = config["mlp_layer_types"].count("dense")
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)


def _latent(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _deepseek2(writer: gguf.GGUFWriter, config: Config) -> None:
    if config["model_type"] == "mistral4" and writer.arch == "deepseek2":  # in Mistral's own layout
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(config["rope_parameters"]["original_max_position_embeddings"])
    _latent(writer, config)
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])


def _glm_dsa(writer: gguf.GGUFWriter, config: Config) -> None:
    _deepseek2(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    writer.add_array("glm-dsa.attention.indexer.types", [each == "full" for each in config["indexer_types"]])


def _minicpm3(writer: gguf.GGUFWriter, config: Config) -> None:
    _latent(writer, config)
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def _granite(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _minicpm(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["scale_emb"])
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def _window(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])


def _window_of_layers(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _published_chatglm(config: Config) -> dict[str, Any]:
    if "ffn_hidden_size" not in config:
        return {}
    names = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layernorm_epsilon",
        "num_key_value_heads": "multi_query_group_num",
    }
    rope = {"rope_theta": 10_000.0 * config["rope_ratio"], "partial_rotary_factor": 0.5}
    return rope | {name: config[own] for name, own in names.items()}


def _published_gemma4(config: Config) -> dict[str, Any]:
    """The sizes of full attention under the names that published configs have."""
    full = next(iter(config["per_layer_config"].values()))
    return {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full.get("num_key_value_heads")}


def _gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if (cap := config["final_logit_softcapping"]) is not None:
        writer.add_final_logit_softcapping(cap)
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _cohere2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_logit_scale(config["logit_scale"])


def _phi3(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config.get("sliding_window") or 0)
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _ernie(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def _exaone_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _window_of_layers(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_nextn_predict_layers(0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _dbrx(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_expert_count(config["ffn_config"]["moe_num_experts"])
    writer.add_expert_used_count(config["ffn_config"]["moe_top_k"])


def _lfm2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _lfm2_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _lfm2(writer, config)
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _delta(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _mpt(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def _ling(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_weights_norm(config.get("norm_topk_prob", True))


def _ling2(writer: gguf.GGUFWriter, config: Config) -> None:
    _ling(writer, config)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _hunyuan(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "dynamic":
        dim = config["head_dim"]
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)
        writer.add_context_length(256 * 1024)


def _hunyuan_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _hunyuan(writer, config)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["moe_topk"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)


def _mimo2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window_size"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    rotations = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rotations["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(rotations["sliding_attention"]["rope_theta"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _mistral4(writer: gguf.GGUFWriter, config: Config) -> None:
    _deepseek2(writer, config)
    writer.add_rope_scaling_yarn_beta_fast(config["rope_parameters"]["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(config["rope_parameters"]["beta_slow"])


def _published_step35(config: Config) -> dict[str, Any]:
    """What the converter makes of lists by layer, those of further layers among them."""
    other = config["attention_other_setting"]["num_attention_heads"]
    bases = config["rope_theta"]
    return {
        "head_counts": [
            other if kind == "sliding_attention" else config["num_attention_heads"] for kind in config["layer_types"]
        ],
        "rope_parameters": {**config["rope_scaling"], "rope_theta": bases[0]},
        "sliding_theta": bases[config["layer_types"].index("sliding_attention")],
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
    }


def _step35(writer: gguf.GGUFWriter, config: Config) -> None:
    further = config["num_nextn_predict_layers"]
    count = config["num_hidden_layers"] + further
    writer.add_block_count(count)
    writer.add_nextn_predict_layers(further)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["sliding_theta"])
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_top_k"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_expert_weight"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(min(map(int, config["moe_layers_enum"].split(","))))
    writer.add_moe_every_n_layers(1)
    for key, add in (
        ("swiglu_limits", writer.add_swiglu_clamp_exp),
        ("swiglu_limits_shared", writer.add_swiglu_clamp_shexp),
    ):
        limits = [each or 0.0 for each in config[key]]
        add(limits + [0.0] * (count - len(limits)))


def _mistral3(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_sections(writer: gguf.GGUFWriter, config: Config) -> None:
    """The share of time, height and width in a head's rotated pairs."""
    pairs = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    writer.add_rope_dimension_sections([pairs - 2 * (pairs // 4), pairs // 4, pairs // 4, 0])


def _of_text(writer: gguf.GGUFWriter, config: Config) -> None:
    _write_sections(writer, config)
    writer.add_uint32(gguf.Keys.LLM.NUM_DEEPSTACK_LAYERS.format(arch=writer.arch), 3)


OWN: dict[str, Callable[[gguf.GGUFWriter, Config], None]] = {
    "bailingmoe": _ling,
    "bailingmoe2": _ling2,
    "cohere2": _cohere2,
    "command-r": lambda writer, config: writer.add_logit_scale(config["logit_scale"]),
    "dbrx": _dbrx,
    "deepseek": _deepseek,
    "deepseek2": lambda writer, config: (_mistral4 if config["model_type"] == "mistral4" else _deepseek2)(
        writer, config
    ),
    "ernie4_5-moe": _ernie,
    "exaone-moe": _exaone_moe,
    "exaone4": _window_of_layers,
    "falcon-h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma3": _window,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "glm-dsa": _glm_dsa,
    "glm4moe": lambda writer, config: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
    "gpt-oss": _window,
    "gptneox": lambda writer, config: writer.add_parallel_residual(config["use_parallel_residual"]),
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "llama4": lambda writer, config: writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"]),
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "mistral3": _mistral3,
    "mimo2": _mimo2,
    "mistral4": _mistral4,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
    "plamo2": _plamo2,
    "plamo3": _plamo3,
    "qwen2vl": _write_sections,
    "qwen3vl": _of_text,
    "qwen3vlmoe": _of_text,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3next": _delta,
    "olmo2": _window_of_layers,
    "phi3": _phi3,
    "phimoe": _phi3,
    "step35": _step35,
    "stablelm": lambda writer, config: writer.add_parallel_residual(config["use_parallel_residual"]),
}
PUBLISHED: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "chatglm": _published_chatglm,
    "gemma4": _published_gemma4,
    "plamo2": _published_plamo2,
    "step35": _published_step35,
}
"""Fields under the names that others have in their places."""
