"""Models whose shapes the GPU benchmarks use: their configs in Hugging Face's form."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128009,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "eos_token_id": 1,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B, "tiny": TINY}


def head_dim_of(config: dict[str, Any]) -> int:
    return int(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def weight_elements(config: dict[str, Any]) -> tuple[int, int]:
    """Elements of the layers' matrices, which every token multiplies, and of the head; embeddings are looked up."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = 2 * hidden * head_dim_of(config) * (heads + config["num_key_value_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])
    return layers, config["vocab_size"] * hidden


def cache_bytes(config: dict[str, Any], tokens: int, itemsize: float = 2) -> float:
    """Bytes of keys and values of so many tokens, in all layers."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim_of(config) * tokens * itemsize
