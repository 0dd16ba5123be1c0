"""Tiny random models of the families whose layers keep a state per sequence, for `tiny_models`."""

from __future__ import annotations

from typing import Any

from tiny_models import TinyModel

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention"]
LFM2 = {"num_hidden_layers": 5, "layer_types": LAYERS, "block_multiple_of": 16}
MAMBA2 = {
    "num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 16, "num_hidden_layers": 3, "intermediate_size": 64,
    "num_attention_heads": None, "num_key_value_heads": None,
}  # fmt: skip


def tiny(name: str, embedding_std: float = 0.2, **config: Any) -> TinyModel:
    return TinyModel(f"{name}ForCausalLM", f"{name}Config", SMALL | config, embedding_std)


FAMILIES: dict[str, TinyModel] = {
    "lfm2": tiny("Lfm2", **LFM2),
    "lfm2_biases": tiny(
        "Lfm2", **(LFM2 | {"block_auto_adjust_ff_dim": False}), conv_bias=True, conv_L_cache=4,
        tie_word_embeddings=False,
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
}  # fmt: skip
