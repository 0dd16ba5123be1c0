"""Tiny GGUF files, written as llama.cpp's converter does, with its names, row order and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import gguf_keys
import gguf_tensors
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_keys import write_config
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BaiChuanForCausalLM": "baichuan",
    "BailingMoeForCausalLM": "bailingmoe",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "BaichuanForCausalLM": "baichuan",
    "BambaForCausalLM": "granitehybrid",
    "BloomForCausalLM": "bloom",
    "ChatGLMModel": "chatglm",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "DbrxForCausalLM": "dbrx",
    "DeciLMForCausalLM": "deci",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "ExaoneForCausalLM": "exaone",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoeForCausalLM": "exaone-moe",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon-h1",
    "FalconMambaForCausalLM": "mamba",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "starcoder",
    "GPTNeoXForCausalLM": "gptneox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GlmForCausalLM": "chatglm",
    "GlmMoeDsaForCausalLM": "glm-dsa",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "InternLM2ForCausalLM": "internlm2",
    "Jais2ForCausalLM": "jais2",
    "JambaForCausalLM": "jamba",
    "KimiLinearForCausalLM": "kimi-linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Llama4ForCausalLM": "llama4",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MiMoV2FlashForCausalLM": "mimo2",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniCPMForCausalLM": "minicpm",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "MistralLarge3ForCausalLM": "deepseek2",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "MptForCausalLM": "mpt",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "OrionForCausalLM": "orion",
    "PanguEmbeddedForCausalLM": "pangu-embedded",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi2",
    "PhimoeForCausalLM": "phimoe",
    "Plamo2ForCausalLM": "plamo2",
    "Plamo3ForCausalLM": "plamo3",
    "QWenLMHeadModel": "qwen",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "RWKV7ForCausalLM": "rwkv7",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "Step3p5ForCausalLM": "step35",
    "XverseForCausalLM": "xverse",
}
NOT_QUANTISED = (
    *(".mlp.gate", ".mlp.gate.wg", ".shared_expert_gate", ".block_sparse_moe.gate", ".router.layer", ".router"),
    *(".feed_forward.gate", ".moe.gate"),
    *(".altup.correction_coefs", ".altup.prediction_coefs", ".altup.modality_router"),
)
SMALL = (
    *("shortconv.conv.weight", "ssm_conv1d.weight", "ssm_norm.weight", "ssm_a", "ssm_d"),
    *("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
)
"""Matrices that stay in floats by their names in the file."""


def save_gguf(model: Any, path: Path, kind: Kind = Kind.F32, tokenizer: Mapping[str, Any] | None = None) -> Path:
    """Writes a transformers model; matrices are stored as `kind`, vectors as F32."""
    return convert(type(model).__name__, model.config.to_dict(), saved_state(model), path, kind, tokenizer)


def saved_state(model: Any) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint, as transformers saves it."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def convert(
    architecture: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    path: Path,
    kind: Kind = Kind.F32,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a GGUF file from a checkpoint's config and its tensors under their published names."""
    arch = gguf_keys.file_architecture(ARCHITECTURES[architecture], config)
    writer = gguf.GGUFWriter(path, arch)
    num_layers = write_config(writer, arch, config)
    for key, value in (tokenizer or {}).items():
        _write(writer, key, value)
    kind_of_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind_of_arch, num_layers)
    converted = gguf_tensors.converted(arch, state, config)
    for key, alphas in gguf_tensors.alphas(converted).items():
        writer.add_array(key, alphas)
    for name, tensor in converted.items():
        own = _name_in_file(names, name)
        values = tensor.float().numpy()
        if values.ndim > 1 and arch not in (*gguf_tensors.WITH_COLUMNS, "kimi-linear"):
            values = values.squeeze()
        is_small = name.rpartition(".")[0].endswith(NOT_QUANTISED) or own.endswith(SMALL) or values.ndim == 1
        wanted = Kind.F32 if is_small else kind
        writer.add_tensor(own, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    _write_rope_factors(writer, config)
    return finish(writer, path)


def _name_in_file(names: gguf.TensorNameMap, name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    own = stem if stem.startswith(("blk.", "cls.")) else names.get_name(stem) or names.get_name(name)
    assert own is not None, f"the tables do not know {stem}"
    return f"{own}.{suffix}"


def save_adapter(
    architecture: str,
    config: Mapping[str, Any],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    path: Path,
    alpha: float,
    kind: Kind = Kind.F32,
    **metadata: Any,
) -> Path:
    """Writes an adapter as llama.cpp's convert_lora_to_gguf.py does. factors: (A, B) by the checkpoint's modules."""
    arch = gguf_keys.file_architecture(ARCHITECTURES[architecture], config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for key, value in metadata.items():
        _write(writer, key.replace("__", "."), value)
    kind_of_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    sizes = {"num_hidden_layers": len(config.get("layers_block_type") or ()), **config}  # Nemotron-H's have no number
    num_layers = next(sizes[key] for key in ("n_layers", "n_layer", "num_layers", "num_hidden_layers") if key in sizes)
    names = gguf.get_tensor_name_map(kind_of_arch, num_layers)
    for name, pair in gguf_tensors.converted_factors(arch, factors, config).items():
        own = _name_in_file(names, name)
        for factor, tensor in zip("ab", pair, strict=True):
            turned = tensor.T if (own, factor) == ("token_embd.weight", "a") else tensor
            values = turned.contiguous().float().numpy()
            is_divided = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            wanted = kind if is_divided else Kind.F32
            writer.add_tensor(f"{own}.lora_{factor}", gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    return finish(writer, path)


def _write_rope_factors(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if "yarn_only_types" in config:  # Step 3.5's, by layer
        rope = {**config["rope_scaling"], "rope_theta": config["rope_theta"][0]}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "proportional":
        half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turned = int(half * rope["partial_rotary_factor"])
        factors = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    if rope.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_tensors(path: Path, tensors: Mapping[str, tuple[np.ndarray, Kind]]) -> Path:
    """Writes a file with these packed tensors and the minimal metadata of a llama."""
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


def _write(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """The rope factors that the converter computes: [head_dim / 2] float32."""
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
