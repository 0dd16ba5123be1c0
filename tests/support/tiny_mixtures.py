"""Tiny random models of the families with experts or latent attention, for `tiny_models`."""

from __future__ import annotations

from typing import Any

from tiny_models import TinyModel

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
DEEPSEEK = EXPERTS | {
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
# With few index heads many scores are 0, and transformers chooses any of equal ones.
INDEXED = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16, "max_position_embeddings": 1024}
DOTS3_NOTE = {
    "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_experts_intermediate_size": 24,
    "routed_scaling_factor": 1.5, "sliding_window": 20, "use_dsa": None, "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 40, "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 12,
}  # fmt: skip
PHIMOE_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0], "short_mscale": 1.2, "long_mscale": 1.2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False
}  # fmt: skip

MISTRAL_4 = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
}  # fmt: skip


def tiny(name: str, config_class: str = "", **config: Any) -> TinyModel:
    return TinyModel(f"{name}ForCausalLM", config_class or f"{name}Config", SMALL | config, 0.2)


LAGUNA = {
    "num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 20, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "moe_routed_scaling_factor": 1.5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_attention_heads_per_layer": [4, 8, 6, 8],
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "full_attention": YARN | {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
DEEPSEEK_V4 = {
    "s": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"
}  # fmt: skip

FAMILIES: dict[str, TinyModel] = {
    "glm4_moe": tiny("Glm4Moe", head_dim=16, use_qk_norm=True, attention_bias=True, **DEEPSEEK),
    "glm4_moe_lite": tiny("Glm4MoeLite", **LATENT, **DEEPSEEK),
    "afmoe": tiny(
        "Afmoe", num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=20, mup_enabled=True,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, num_dense_layers=1, route_scale=2.5,
        global_attn_every_n_layers=2, pad_token_id=2, max_position_embeddings=1024,
    ),
    "axk1": tiny("AXK1", max_position_embeddings=1024, **LATENT, **DEEPSEEK),
    "mistral4": tiny(
        "Mistral4", max_position_embeddings=1024, rope_parameters=MISTRAL_4, **LATENT, **DEEPSEEK,
    ),
    "cohere2_moe": tiny(
        "Cohere2Moe", num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=20, num_experts=8,
        num_experts_per_tok=3, num_shared_experts=2, prefix_dense_intermediate_size=40,
        layer_types=["full_attention", "sliding_attention"] * 2, max_position_embeddings=1024,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], logit_scale=0.5, pad_token_id=2,
    ),
    "cohere2_moe_sigmoid": tiny(
        "Cohere2Moe", num_key_value_heads=2, head_dim=16, sliding_window=20, num_experts=8, num_experts_per_tok=3,
        num_shared_experts=1, shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid",
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=1024, rms_norm_eps=1e-5,
        logit_scale=0.5, pad_token_id=2,
    ),
    "dots1": tiny("Dots1", head_dim=16, sliding_window=20, max_window_layers=1, **DEEPSEEK),
    "minimax_m2": tiny("MiniMaxM2", head_dim=16, rotary_dim=8, **EXPERTS),
    "granitemoe": tiny(
        "GraniteMoe", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=4.0,
        **EXPERTS,
    ),
    "granitemoe_swa": tiny(
        "GraniteMoeSWA", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2,
        logits_scaling=4.0, sliding_window=20, layer_types=["sliding_attention", "full_attention"],
        shared_intermediate_size=40, layer_rope_theta=[10000.0, 0], **EXPERTS,
    ),
    "ernie4_5_moe": tiny(
        "Ernie4_5_Moe", moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2, head_dim=16,
        moe_layer_interval=2, num_hidden_layers=3,
    ),
    "hunyuan_moe": tiny(
        "HunYuanMoEV1", head_dim=16, num_experts=8, moe_topk=3, attention_bias=True, intermediate_size=32,
    ),
    "minicpm3": tiny("MiniCPM3", scale_emb=1, scale_depth=1.4, tie_word_embeddings=False, **LATENT),
    "kimi_k2": tiny("DeepseekV3", **LATENT, **(DEEPSEEK | {"n_group": 1, "topk_group": 1})),
    "phimoe": tiny("Phimoe", num_local_experts=8, num_experts_per_tok=2, router_jitter_noise=0.4),
    "phimoe_longrope": tiny(
        "Phimoe", num_local_experts=8, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True,
        rope_parameters=PHIMOE_LONGROPE, max_position_embeddings=512,
    ),
    "llama4": tiny(
        "Llama4", "Llama4TextConfig", num_hidden_layers=4, head_dim=16, num_local_experts=8, num_experts_per_tok=1,
        interleave_moe_layer_step=2, no_rope_layer_interval=4, intermediate_size_mlp=64, attention_chunk_size=16,
        floor_scale=12, attn_scale=0.4,
    ),
    "llama4_plain": tiny(
        "Llama4", "Llama4TextConfig", head_dim=16, num_local_experts=8, num_experts_per_tok=1, use_qk_norm=False,
        no_rope_layers=[0, 1],
    ),
    "gpt_oss": tiny("GptOss", head_dim=16, sliding_window=20, rope_parameters=YARN, **EXPERTS),
    "exaone_moe": tiny(
        "ExaoneMoe", layer_types=["sliding_attention", "full_attention"], num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, n_group=4, topk_group=2, num_shared_experts=2, sliding_window=20,
    ),
    "dbrx": tiny(
        "Dbrx", d_model=32, n_heads=4, n_layers=2, max_seq_len=128,
        attn_config={"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 300.0},
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
    ),
    "mimo_v2": tiny(
        "MiMoV2Flash", layer_types=["full_attention", "sliding_attention"],
        head_dim=24, v_head_dim=8, sliding_window_size=19, attention_bias=True, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32, max_position_embeddings=1024,
    ),
    "longcat_flash": tiny(
        "LongcatFlash", num_layers=2, num_hidden_layers=4, ffn_hidden_size=48, expert_ffn_hidden_size=32, moe_topk=3,
        zero_expert_num=4, routed_scaling_factor=1.5, head_dim=8, **LATENT, n_routed_experts=8,
    ),
    "minimax_m3": tiny(
        "MiniMaxM3VL", "MiniMaxM3VLTextConfig", num_hidden_layers=3, head_dim=16, num_key_value_heads=2, rotary_dim=8,
        index_n_heads=2, index_head_dim=16, index_block_size=8, index_topk_blocks=3, index_local_blocks=1,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], dense_intermediate_size=40,
        mlp_layer_types=["dense", "sparse", "sparse"], shared_intermediate_size=24, num_local_experts=8,
        num_experts_per_tok=3, routed_scaling_factor=1.5, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "deepseek_v32": tiny("DeepseekV32", **LATENT, **(DEEPSEEK | INDEXED)),
    "dots3_note": tiny(
        "Dots3Note", "Dots3NoteTextConfig", num_hidden_layers=4, **DOTS3_NOTE, **INDEXED,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
    ),
    "dots3_note_full": tiny(
        "Dots3Note", "Dots3NoteTextConfig", num_hidden_layers=3, **DOTS3_NOTE, max_position_embeddings=1024,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "deepseek_v4": tiny(
        "DeepseekV4", num_hidden_layers=5, q_lora_rank=24, head_dim=16, partial_rotary_factor=0.5, sliding_window=20,
        layer_types=[DEEPSEEK_V4[each] for each in "shchc"], compress_rates={DEEPSEEK_V4["c"]: 4, DEEPSEEK_V4["h"]: 32},
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe", "moe"], n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, o_groups=2, o_lora_rank=12, hc_mult=3, hc_sinkhorn_iters=5, pad_token_id=2,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
            "beta_slow": 1,
        }, **INDEXED,
    ),
    "flex_olmo": tiny("FlexOlmo", num_experts=8, num_experts_per_tok=3, max_position_embeddings=1024),
    "flint": tiny(
        "Flint", head_dim=16, sliding_window=20, max_position_embeddings=1024, num_experts=8, num_experts_per_tok=3,
        layer_types=["sliding_attention", "full_attention"], mlp_only_layers=[1], moe_intermediate_size=32,
        shared_expert_intermediate_size=24,
    ),
    "hy_v3": tiny(
        "HYV3", num_hidden_layers=3, head_dim=16, num_experts=8, num_experts_per_tok=3, num_shared_experts=2,
        moe_intermediate_size=32, router_scaling_factor=1.5, max_position_embeddings=1024,
    ),
    "mellum": tiny(
        "Mellum", head_dim=16, sliding_window=20, max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["sparse", "dense"], num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32,
        rope_parameters={
            "full_attention": YARN | {"rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "laguna": tiny("Laguna", **LAGUNA, moe_router_logit_softcapping=1.5),
    "laguna_columns": tiny(
        "Laguna", **(LAGUNA | {"rope_parameters": None, "num_attention_heads_per_layer": None}), attention_bias=True,
        gating="per-element",
    ),
    "solar_open": tiny("SolarOpen", head_dim=16, max_position_embeddings=1024, **DEEPSEEK),
    "youtu": tiny("Youtu", max_position_embeddings=1024, **LATENT),
    "hy_v4": tiny(
        "HYV4", num_hidden_layers=4, indexer_types=["full", "shared", "full", "full"], hc_mult=3, pad_token_id=2,
        **(LATENT | DEEPSEEK | INDEXED | {"n_group": 1, "topk_group": 1}),
    ),
    "glm_moe_dsa": tiny(
        "GlmMoeDsa", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"], **LATENT,
        **(DEEPSEEK | INDEXED),
    ),
}  # fmt: skip
