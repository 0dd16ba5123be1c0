"""Tiny GGUF files, written as llama.cpp's converter writes them: its names, its row order, its norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

LAYER_NORM_EPS = ("layer_norm_eps", "norm_epsilon", "norm_eps")
PERMUTED = ("llama", "smollm3", "arcee", "granite", "granitemoe", "olmo")
MIXTRAL_NAMES = {"gate_proj.weight": "w1.weight", "up_proj.weight": "w3.weight", "down_proj.weight": "w2.weight"}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "SmolLM3ForCausalLM": "smollm3",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "OlmoeForCausalLM": "olmoe",
    "ArceeForCausalLM": "arcee",
    "CohereForCausalLM": "command-r",
    "GemmaForCausalLM": "gemma",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "PhiForCausalLM": "phi2",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Glm4ForCausalLM": "glm4",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}


def save_gguf(model: Any, path: Path, kind: Kind = Kind.F32, tokenizer: Mapping[str, Any] | None = None) -> Path:
    """Writes a transformers model; matrices are stored as `kind`, vectors as F32."""
    config = model.config
    arch = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, arch)
    _write_config(writer, arch, config)
    for key, value in (tokenizer or {}).items():
        _write(writer, key, value)
    kind_of_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind_of_arch, config.num_hidden_layers)
    for name, tensor in _stacked(tiny_models.state_of(model)).items():
        stem, suffix = name.rsplit(".", 1)
        values = _as_converted(arch, name, tensor, config).float().numpy()
        is_router = stem.endswith((".mlp.gate", ".shared_expert_gate", ".block_sparse_moe.gate", ".router.layer"))
        wanted = Kind.F32 if is_router or values.ndim == 1 else kind
        found = f"{names.get_name(stem)}.{suffix}"
        if stem.endswith(".shared_expert_gate"):
            values = values.squeeze()
        writer.add_tensor(found, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_tensors(path: Path, tensors: Mapping[str, tuple[np.ndarray, Kind]]) -> Path:
    """A file of these tensors, packed already, beside the least metadata that a llama needs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    return finish(writer, path)


def _stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With one tensor of each matrix of a layer's experts, as the converter merges them."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        start, dot, rest = name.partition(".experts.")
        if dot:
            number, _, kind = rest.partition(".")
            if start.endswith(".block_sparse_moe"):  # the tables know Mixtral's names there, and not Granite's
                kind = MIXTRAL_NAMES.get(kind, kind)
            stack = stacks.setdefault(f"{start}.experts.{kind}", [])
            assert int(number) == len(stack), "experts come in order"
            stack.append(tensor)
        else:
            found[name] = tensor
    return found | {name: torch.stack(stack) for name, stack in stacks.items()}


def _as_converted(arch: str, name: str, tensor: Tensor, config: Any) -> Tensor:
    """What the converter stores for a tensor of the checkpoint."""
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if arch in PERMUTED and heads:
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _write_config(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(
            next((getattr(config, key) for key in LAYER_NORM_EPS if hasattr(config, key)), 1e-5)  # OLMo's
        )
    _write_multipliers(writer, arch, config)
    if (partial := full.get("partial_rotary_factor", 1.0)) != 1.0:
        writer.add_rope_dimension_count(int(partial * config.hidden_size // config.num_attention_heads))
    if arch == "phi3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(full["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch in ("qwen3", "gemma2", "gemma3") or head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in PERMUTED:
        writer.add_rope_dimension_count(head_dim)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        _write_experts(writer, arch, config)
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    for name in ("bos", "eos"):
        token_id = getattr(config, f"{name}_token_id", None)
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)


def _write_multipliers(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "command-r":
        writer.add_logit_scale(config.logit_scale)
    if arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)


def _write_experts(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts if arch in ("llama", "granitemoe") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    renormalised = getattr(config, "norm_topk_prob", True)
    if renormalised != (
        arch in ("llama", "granitemoe", "qwen3moe")
    ):  # what the architecture is known for goes without saying
        writer.add_expert_weights_norm(renormalised)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32, as the converter works them out."""
    low_length = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_length = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in (1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < high_length:
            factors.append(1.0)
        elif wavelength > low_length:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
