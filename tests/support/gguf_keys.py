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
    "llama", "smollm3", "arcee", "granite", "granitemoe", "olmo", "baichuan", "internlm2", "minicpm",
)  # fmt: skip
LATENT = ("deepseek2", "minicpm3")
OWN_HEADS = ("qwen3", "gemma2", "gemma3", "gemma3n", "gpt-oss")
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
}


def first(config: Config, what: str) -> Any:
    """The value of a size under whichever of its names the config uses."""
    return next(config[key] for key in NAMES[what] if config.get(key) is not None)


def write_config(writer: gguf.GGUFWriter, arch: str, config: Config) -> int:
    """Writes the metadata and returns the number of layers."""
    if arch in ("mamba", "mamba2"):
        (_write_mamba2 if arch == "mamba2" else _write_mamba)(writer, config)
        _write_tokens(writer, config)
        return int(config["num_hidden_layers"])
    layers, hidden, heads = first(config, "layers"), first(config, "hidden"), first(config, "heads")
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_block_count(layers)
    writer.add_context_length(
        2048 if arch == "falcon" else next((config[k] for k in NAMES["context"] if config.get(k)), 2048)
    )
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(_inner(arch, config, hidden))
    writer.add_head_count(heads)
    if arch not in ("gpt2", "mpt", "qwen"):
        writer.add_head_count_kv(1 if arch in ("deepseek2", "starcoder") else _groups(arch, config, heads))
    if arch == "qwen":
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    elif arch.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    elif "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(next((config[key] for key in EPS if key in config), 1e-5))  # OLMo's
    if (theta := rope.get("rope_theta", config.get("rope_theta"))) is not None:
        writer.add_rope_freq_base(theta)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0
    if arch not in LATENT and (partial != 1.0 or arch in PERMUTED):
        writer.add_rope_dimension_count(int(partial * head_dim))
    if arch not in LATENT and (arch in OWN_HEADS or head_dim * heads != hidden):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "num_experts_per_tok" in config and arch != "minicpm3":
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


def _lfm2_inner(config: Config) -> int:
    inner = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", False):
        return int(inner)
    step = config["block_multiple_of"]
    return int(-(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // step) * step)


def _inner(arch: str, config: Config, hidden: int) -> int | list[int]:
    if arch.startswith("lfm2"):
        return _lfm2_inner(config)
    if arch == "gemma3n":
        return list(config["intermediate_size"])
    if arch in ("falcon", "bloom", "mpt", "gpt2", "starcoder"):
        return 4 * hidden
    return int(config["intermediate_size_mlp" if arch == "llama4" else "intermediate_size"])


def _groups(arch: str, config: Config, heads: int) -> int | list[int]:
    if arch.startswith("lfm2"):
        return [0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]]
    if arch == "falcon":
        return int(config.get("num_kv_heads") or 1) if config["new_decoder_architecture"] else 1
    return heads if arch in ("bloom", "phi2", "gptneox") else int(config.get("num_key_value_heads") or heads)


def _write_scaling(writer: gguf.GGUFWriter, arch: str, rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn" and arch == "deepseek2" and rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_experts(writer: gguf.GGUFWriter, arch: str, config: Config) -> None:
    count = next(config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k))
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch in ("qwen2moe", "qwen3moe", "glm4moe", "deepseek2", "dots1", "lfm2moe", "qwen3next", "qwen35moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    elif arch in ("gpt-oss", "minimax-m2", "llama4"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    renormalised = config.get("norm_topk_prob", True)
    if arch in ("glm4moe", "deepseek2", "dots1"):
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
    _latent(writer, config)
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])


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


OWN: dict[str, Callable[[gguf.GGUFWriter, Config], None]] = {
    "cohere2": _cohere2,
    "command-r": lambda writer, config: writer.add_logit_scale(config["logit_scale"]),
    "deepseek2": _deepseek2,
    "ernie4_5-moe": _ernie,
    "exaone4": _window_of_layers,
    "gemma2": _gemma2,
    "gemma3": _window,
    "gemma3n": _gemma3n,
    "glm4moe": lambda writer, config: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
    "gpt-oss": _window,
    "gptneox": lambda writer, config: writer.add_parallel_residual(config["use_parallel_residual"]),
    "granite": _granite,
    "granitemoe": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "llama4": lambda writer, config: writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"]),
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "mpt": _mpt,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3next": _delta,
    "olmo2": _window_of_layers,
    "phi3": _phi3,
    "phimoe": _phi3,
    "stablelm": lambda writer, config: writer.add_parallel_residual(config["use_parallel_residual"]),
}
