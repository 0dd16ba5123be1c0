"""Tiny random models of the dense families, for `tiny_models`: one or more configs of each."""

from __future__ import annotations

import inspect
from typing import Any

import muse_glimmer  # noqa: F401 (a class of transformers)
from tiny_models import COMMON, TinyModel

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}


def tiny(name: str, config_class: str = "", embedding_std: float = 0.2, **config: Any) -> TinyModel:
    return TinyModel(f"{name}ForCausalLM", config_class or f"{name}Config", SMALL | config, embedding_std)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0], "partial_rotary_factor": 1.0,
}  # fmt: skip
WINDOW = {"sliding_window": 20}
MINISTRAL3 = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
HYBRID = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}

GEMMA3N = {
    "head_dim": 8, "num_key_value_heads": 1, "num_hidden_layers": 5, "sliding_window": 20, "laurel_rank": 6,
    "hidden_size_per_layer_input": 8, "embedding_std": 0.05, "pad_token_id": 2, "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip

FAMILIES: dict[str, TinyModel] = {
    "phi": tiny("Phi", num_key_value_heads=4),
    "phi3": tiny("Phi3", **WINDOW),
    "phi3_longrope": tiny("Phi3", rope_parameters=LONGROPE, max_position_embeddings=512),
    "granite": tiny("Granite", **(GRANITE | {"embedding_multiplier": 1.5}), tie_word_embeddings=True),
    "granite_swa": tiny(
        "GraniteSWA",
        **(GRANITE | {"num_hidden_layers": 5, "embedding_multiplier": 1.5}),
        sliding_window=20,
        layer_rope_theta=[0, 10000.0, 10000.0, 500.0, 10000.0],
    ),
    "granite_biases": tiny("Granite", **GRANITE, attention_bias=True, mlp_bias=True),
    "hyperclovax": tiny("HyperCLOVAX", **(GRANITE | {"logits_scaling": 0.5}), use_post_norm=True),
    "gpt_neox": tiny("GPTNeoX", hidden_size=64, tie_word_embeddings=False),
    "gpt_neox_serial": tiny("GPTNeoX", hidden_size=64, use_parallel_residual=False, attention_bias=False),
    "gptj": tiny("GPTJ", **GPT2, rotary_dim=4, tie_word_embeddings=False),
    "codegen": tiny(
        "CodeGen", embedding_std=1.0, hidden_size=64, num_attention_heads=8, rotary_dim=6, tie_word_embeddings=False
    ),
    "persimmon": tiny("Persimmon", embedding_std=0.5, tie_word_embeddings=False),
    "persimmon_plain": tiny("Persimmon", qk_layernorm=False, tie_word_embeddings=False),
    "gpt_neo": tiny(
        "GPTNeo", num_hidden_layers=3, window_size=20, attention_types=[[["global", "local", "global"], 1]]
    ),
    "gpt2": TinyModel("GPT2LMHeadModel", "GPT2Config", SMALL | GPT2, 0.2),
    "gpt2_scaled_by_layer": TinyModel(
        "GPT2LMHeadModel",
        "GPT2Config",
        SMALL | GPT2 | {"n_layer": 3, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        0.2,
    ),
    "gpt_bigcode": tiny("GPTBigCode", **GPT2),
    "gpt_bigcode_heads": tiny("GPTBigCode", embedding_std=0.4, **GPT2, multi_query=False, tie_word_embeddings=False),
    "falcon": tiny("Falcon", alibi=False, bias=False),
    "falcon_alibi": tiny("Falcon", parallel_attn=False, multi_query=False, alibi=True, bias=True),
    "bloom": tiny("Bloom"),
    "bloom_normed_residual": tiny("Bloom", apply_residual_connection_post_layernorm=True),
    "bloom_6_heads": tiny("Bloom", num_attention_heads=6, hidden_size=48, tie_word_embeddings=False),
    "mpt": tiny("Mpt", embedding_std=0.4, d_model=32, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=4),
    "mpt_clipped": tiny(
        "Mpt",
        embedding_std=0.4,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        expansion_ratio=4,
        attn_config={"clip_qkv": 0.3},
    ),
    "falcon_new": tiny("Falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "falcon_serial": tiny("Falcon", parallel_attn=False, multi_query=False, alibi=False, bias=True),
    "starcoder2": tiny("Starcoder2", embedding_std=0.1, **WINDOW),
    "cohere": tiny("Cohere", logit_scale=0.25),
    "cohere2": tiny("Cohere2", **HYBRID),
    "olmo": tiny("Olmo", tie_word_embeddings=False),
    "olmo_clipped": tiny("Olmo", embedding_std=1.0, clip_qkv=0.4, tie_word_embeddings=False),
    "olmo2": tiny("Olmo2", tie_word_embeddings=False),
    "olmo3": tiny("Olmo3", tie_word_embeddings=False, **HYBRID),
    "stablelm": tiny("StableLm", hidden_size=64, tie_word_embeddings=False, use_qkv_bias=True),
    "stablelm_parallel": tiny("StableLm", hidden_size=64, tie_word_embeddings=False, use_parallel_residual=True),
    "nemotron": tiny("Nemotron", head_dim=8, tie_word_embeddings=False),
    "apertus": tiny("Apertus"),
    "arcee": tiny("Arcee"),
    "jais2": tiny("Jais2"),
    "glm": tiny("Glm", head_dim=8, attention_bias=True),
    "glm4": tiny("Glm4", head_dim=8, attention_bias=True),
    "helium": tiny("Helium", head_dim=8),
    "ernie4_5": tiny("Ernie4_5", head_dim=8, use_bias=True),
    "ernie4_5_plain": tiny("Ernie4_5", head_dim=8, tie_word_embeddings=False),
    "seed_oss": tiny("SeedOss", head_dim=8),
    "ministral": tiny("Ministral", **HYBRID, head_dim=8),
    "ministral3": tiny("Ministral3", head_dim=8, rope_parameters=MINISTRAL3),
    "ministral3_sliding": tiny("Ministral3", head_dim=8, rope_parameters=MINISTRAL3, **WINDOW),
    "hunyuan": tiny("HunYuanDenseV1", head_dim=8, attention_bias=True),
    "hunyuan_alpha": tiny(
        "HunYuanDenseV1",
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
    ),
    "cwm": tiny("Cwm", **HYBRID, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "exaone4": tiny("Exaone4", **HYBRID),
    "exaone4_full": tiny("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "gemma": tiny("Gemma", head_dim=8, num_key_value_heads=1, embedding_std=0.05),
    "gemma3n": tiny(
        "Gemma3n",
        "Gemma3nTextConfig",
        **GEMMA3N,
        activation_sparsity_pattern=[0.4, 0.0, 0.0, 0.0, 0.7],
        intermediate_size=[50, 40, 48, 48, 48],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=100,
    ),
    "gemma3n_plain": tiny(
        "Gemma3n",
        "Gemma3nTextConfig",
        **GEMMA3N,
        num_kv_shared_layers=0,
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
    ),
    "muse_glimmer": tiny(
        "MuseGlimmer",
        "MuseGlimmerTextConfig",
        num_hidden_layers=5,
        head_dim=16,
        sliding_window=20,
        max_position_embeddings=1024,
        qk_scale_factor=1.5,
        output_multiplier=0.7,
        final_logit_softcapping=9.0,
    ),
    "gemma4": tiny(
        "Gemma4",
        "Gemma4TextConfig",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 3,
        num_kv_shared_layers=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=20,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        pad_token_id=2,
        max_position_embeddings=1024,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
        embedding_std=0.05,
    ),
    "gemma4_dense": tiny(
        "Gemma4",
        "Gemma4TextConfig",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        head_dim=16,
        global_head_dim=512,
        sliding_window=20,
        hidden_size_per_layer_input=0,
        max_position_embeddings=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        embedding_std=0.05,
    ),
    "gemma4_experts": tiny(
        "Gemma4",
        "Gemma4TextConfig",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        head_dim=8,
        global_head_dim=16,
        sliding_window=20,
        hidden_size_per_layer_input=0,
        max_position_embeddings=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
        embedding_std=0.05,
    ),
    "vaultgemma": tiny(
        "VaultGemma", **HYBRID, head_dim=8, query_pre_attn_scalar=8, embedding_std=0.05, final_logit_softcapping=3.0
    ),
    "biogpt": tiny("BioGpt", pad_token_id=2),
    "hrm_text": tiny("HrmText", head_dim=8, prefix_lm=False, max_position_embeddings=1024, tie_word_embeddings=False),
    "hrm_text_biases": tiny(
        "HrmText",
        num_hidden_layers=1,
        H_cycles=3,
        L_cycles=1,
        head_dim=8,
        prefix_lm=False,
        attention_bias=True,
        mlp_bias=True,
        embedding_scale=3.0,
    ),
}

FOREIGN = (
    "afmoe", "apertus", "aria_text", "beam", "bitnet", "cohere2_moe", "ctrl", "dots1", "ernie4_5_moe",
    "flex_olmo", "gemma2", "glm4_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "kolibri1", "laguna", "llama", "mellum", "minimax_m2", "ministral3", "modernbert-decoder", "nanochat", "persimmon",
    "phimoe", "solar_open",
)  # fmt: skip
"""Model types that tests run with transformers' code."""
# Sizes, under all names that configs use for them.
SIZES = SMALL | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_num_experts": 4, "moe_k": 2, "num_shared_experts": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128,
    "shared_expert_intermediate_size": 16, "tie_word_embeddings": False, "pad_token_id": 2,
}  # fmt: skip


def foreign(model_type: str) -> TinyModel:
    """A tiny model of the type, with the sizes that its config class has."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    config = {name: value for name, value in SIZES.items() if name in known or name in COMMON}
    return TinyModel(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], config_class.__name__, config, 0.2)
