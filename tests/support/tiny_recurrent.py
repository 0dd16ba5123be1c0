"""Tiny random models of the families whose layers keep a state per sequence, for `tiny_models`."""

from __future__ import annotations

from typing import Any

import glm5_next  # noqa: F401 (a class of transformers)
from tiny_models import TinyModel

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention"]
LFM2 = {"num_hidden_layers": 5, "layer_types": LAYERS, "block_multiple_of": 16}
MAMBA2 = {
    "num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 16, "num_hidden_layers": 3, "intermediate_size": 64,
    "num_attention_heads": None, "num_key_value_heads": None,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "full_attention_interval": 3,
}  # fmt: skip
DELTA_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
MAMBA = {
    "state_size": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": None,
    "num_key_value_heads": None,
}
GLM5_NEXT = {
    "num_hidden_layers": 5, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4, "pad_token_id": 2,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "indexed", "indexed", "linear", "indexed")],
    "indexer_types": ["full", "full", "shared", "shared", "full"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "v_head_dim": 20, "hc_mult": 3,
    "index_topk": 12, "index_head_dim": 16, "index_n_heads": 16, "index_kpool": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip
INKLING: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8, "sliding_window_size": 20,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "d_rel": 5, "rel_extent": 40,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "route_scale": 8.0, "logits_mup_width_multiplier": 3.0,
    "log_scaling_n_floor": 30, "log_scaling_alpha": 0.3, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN4: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "hc_count": 3, "hc_lowrank": 10, "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3,
    "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "eos_token_id": 52, "pad_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
"""eos_token_id is among the tokens of prompts. With 16 index heads no two pools have a score of 0."""
BESIDE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}


def tiny(name: str, embedding_std: float = 0.2, **config: Any) -> TinyModel:
    return TinyModel(f"{name}ForCausalLM", f"{name}Config", SMALL | config, embedding_std)


FAMILIES: dict[str, TinyModel] = {
    "lfm2": tiny("Lfm2", **LFM2),
    "lfm2_biases": tiny(
        "Lfm2", **(LFM2 | {"block_auto_adjust_ff_dim": False}), conv_bias=True, conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "lfm3": tiny(
        "Lfm3", num_hidden_layers=3, layer_types=["conv", "full_attention", "sliding_attention"], head_dim=16,
        sliding_window=20, norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "lfm2_moe": tiny(
        "Lfm2Moe", num_hidden_layers=5, layer_types=LAYERS, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, num_dense_layers=2, routed_scaling_factor=1.5,
    ),
    "lfm2_moe_plain": tiny(
        "Lfm2Moe", num_hidden_layers=5, layer_types=LAYERS, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, num_dense_layers=1, use_expert_bias=False, norm_topk_prob=False,
    ),
    "mamba2": tiny("Mamba2", **MAMBA2, n_groups=2, time_step_limit=[0.0, 0.6]),
    "mamba2_one_group": tiny(
        "Mamba2", **MAMBA2, n_groups=1, tie_word_embeddings=True, use_bias=True, use_conv_bias=False, conv_kernel=3
    ),
    "qwen3_next": tiny("Qwen3Next", **DELTA, **DELTA_EXPERTS, mlp_only_layers=[1], attention_bias=True),
    "qwen3_5": TinyModel("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", SMALL | DELTA | {"tie_word_embeddings": True}, 0.2),
    "qwen3_5_moe": TinyModel(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig",
        SMALL | DELTA | DELTA_EXPERTS | {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3}, 0.2,
    ),
    "granite_hybrid": tiny(
        "GraniteMoeHybrid", **BESIDE, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=3,
        shared_intermediate_size=40, layer_types=["mamba", "attention", "mamba", "mamba"], embedding_multiplier=6.0,
        residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=4.0, mamba_n_groups=2,
    ),
    "granite_hybrid_dense": tiny(
        "GraniteMoeHybrid", **BESIDE, num_hidden_layers=3, num_local_experts=0, shared_intermediate_size=40,
        layer_types=["mamba", "mamba", "attention"], position_embedding_type="rope", mamba_proj_bias=True,
    ),
    "granite_hybrid_attention": tiny(  # as Granite 4's smallest, which has no recurrent layer
        "GraniteMoeHybrid", **BESIDE, num_hidden_layers=3, num_local_experts=0, shared_intermediate_size=40,
        layer_types=["attention"] * 3, position_embedding_type="rope",
    ),
    "bamba": tiny("Bamba", **BESIDE, num_hidden_layers=3, attn_layer_indices=[1], time_step_limit=[0.0, 0.6]),
    "nemotron_h": tiny(
        "NemotronH", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16, head_dim=16,
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "moe"], n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32, moe_shared_expert_intermediate_size=40, n_group=2,
        topk_group=1, routed_scaling_factor=1.5,
    ),
    "nemotron_h_latent": tiny(
        "NemotronH", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16, head_dim=16,
        layers_block_type=["mamba", "moe", "attention", "moe", "mlp"], n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=40, moe_latent_size=24,
        routed_scaling_factor=1.5,
    ),
    "nemotron_h_dense": tiny(
        "NemotronH", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16, head_dim=16,
        layers_block_type=["mamba", "mlp", "attention", "mlp"],
    ),
    "falcon_h1": tiny(
        "FalconH1", **BESIDE, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_groups=2, key_multiplier=0.4,
        attention_in_multiplier=0.9, attention_out_multiplier=0.8, ssm_in_multiplier=1.2, ssm_out_multiplier=0.7,
        ssm_multipliers=[0.9, 0.8, 0.7, 1.1, 0.6], mlp_multipliers=[0.8, 0.6], lm_head_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    "falcon_h1_normed": tiny(
        "FalconH1", **BESIDE, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_groups=1, mamba_rms_norm=True,
        mamba_norm_before_gate=False, projectors_bias=True, attention_bias=True, attention_in_multiplier=0.9,
        attention_out_multiplier=0.8,
    ),
    "mamba": tiny("Mamba", **MAMBA, tie_word_embeddings=False),
    "falcon_mamba": tiny(
        "FalconMamba", **(MAMBA | {"intermediate_size": 48}), use_bias=True, use_conv_bias=False, conv_kernel=3,
        mixer_rms_eps=1e-3,
    ),
    "jamba": tiny(
        "Jamba", num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=1, num_experts=8, num_experts_per_tok=3,
        mamba_d_state=8, mamba_dt_rank=5, mamba_proj_bias=True,
    ),
    "kimi_linear": tiny(
        "KimiLinear", num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=8, linear_num_heads=4, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
        num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_group=2, topk_group=1,
        num_key_value_heads=4,
    ),
    "glm5_next": TinyModel("Glm5NextForCausalLM", "Glm5NextTextConfig", SMALL | GLM5_NEXT, 0.2),
    "inkling": TinyModel("InklingForCausalLM", "InklingTextConfig", SMALL | INKLING, 0.2),
    "qwen4_exp": TinyModel("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", SMALL | QWEN4 | DELTA_EXPERTS, 0.2),
    "minimax": tiny(
        "MiniMax", num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
        head_dim=8, num_local_experts=8, num_experts_per_tok=3, block_size=16, full_attn_alpha_factor=3.5,
        linear_attn_alpha_factor=3.5, mlp_alpha_factor=3.5, full_attn_beta_factor=0.9, linear_attn_beta_factor=1.1,
        mlp_beta_factor=0.8,
    ),
    "olmo_hybrid": tiny(
        "OlmoHybrid", num_hidden_layers=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "bailing_hybrid": tiny(
        "BailingHybrid", num_hidden_layers=4, layer_group_size=2, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=16, head_dim=8, num_local_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4,
        pad_token_id=2, eos_token_id=1,
    ),
    "recurrent_gemma": tiny(
        "RecurrentGemma", 0.02, num_hidden_layers=4, lru_width=48, attention_window_size=20, attention_bias=True,
    ),
    "zamba2": tiny(
        "Zamba2", num_hidden_layers=6, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
        n_mamba_heads=8, mamba_d_state=16, mamba_ngroups=2, num_key_value_heads=4, num_mem_blocks=2, adapter_rank=6,
        use_shared_attention_adapter=True, use_mem_rope=True, chunk_size=16,
    ),
}  # fmt: skip
