"""Tiny random multimodal models, of whose checkpoints the language model is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from published_models import STEP

TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SECTIONS = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def llava(kind: str, name: str) -> Callable[[], Any]:
    def make() -> Any:
        text = getattr(transformers, f"{kind}Config")(**TEXT)
        tower = transformers.PixtralVisionConfig if name == "Mistral3" else transformers.CLIPVisionConfig
        vision = tower(**VISION, image_size=28, patch_size=14)
        config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def qwen(name: str) -> Callable[[], Any]:
    def make() -> Any:
        rope = {key: value for key, value in SECTIONS.items() if name != "Qwen3VL" or key != "type"}
        text = TEXT | {"rope_parameters": rope, "head_dim": 16, "tie_word_embeddings": False}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=QWEN_VISION)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def qwen_3_5(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        rope = {**SECTIONS, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        del rope["type"]
        text = TEXT | LINEAR | more | {"rope_parameters": rope, "head_dim": 16, "tie_word_embeddings": False}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=QWEN_VISION)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def other(name: str, kind: str = "Llama", vision_class: str = "", **vision: Any) -> Callable[[], Any]:
    def make() -> Any:
        text = getattr(transformers, f"{kind}Config")(**TEXT)
        found = getattr(transformers, vision_class or f"{name}VisionConfig")(**VISION, **vision)
        part = "audio_config" if name == "Voxtral" else "vision_config"
        config = getattr(transformers, f"{name}Config")(text_config=text, **{part: found})
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


LATENT = TEXT | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 40,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip


def mistral_4() -> Any:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=28, patch_size=14)
    text = transformers.Mistral4Config(**LATENT)
    config = transformers.Mistral3Config(vision_config=vision, text_config=text, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


def kimi() -> Any:
    text = transformers.DeepseekV3Config(**LATENT)
    sizes = {"pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 1, "patch_size": 14}
    vision = transformers.Kimi_K25VisionConfig(**VISION, **sizes)
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


def muse_glimmer() -> Any:
    text = transformers.MuseGlimmerTextConfig(**TEXT, head_dim=16, sliding_window=4)
    sizes = {"pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 14}
    vision = transformers.MuseGlimmerVisionConfig(**VISION, **sizes)
    config = transformers.MuseGlimmerConfig(
        text_config=text, vision_config=vision, out_hidden_size=128, projector_hidden_size=32
    )
    return transformers.MuseGlimmerForConditionalGeneration(config)


def hyperclovax() -> Any:
    text = transformers.HyperCLOVAXConfig(
        **TEXT, logits_scaling=0.7, residual_multiplier=0.8, tie_word_embeddings=False
    )
    vision = {"model_type": "qwen2_5_vl_vision", "intermediate_size": 32} | QWEN_VISION
    del vision["embed_dim"]
    config = transformers.HyperCLOVAXVisionV2Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.HyperCLOVAXVisionV2ForConditionalGeneration(config)


SIGLIP = {"vision_class": "SiglipVisionConfig", "image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, Callable[[], Any]] = {
    "llava with llama": llava("Llama", "Llava"),
    "llava with mistral": llava("Mistral", "LlavaNext"),
    "llava with qwen": llava("Qwen2", "LlavaOnevision"),
    "mistral 3": llava("Mistral", "Mistral3"),
    "mistral 3 with ministral 3": llava("Ministral3", "Mistral3"),
    "mistral 3 with mistral 4": mistral_4,
    "kimi k2.5": kimi,
    "hyperclova x think": hyperclovax,
    "muse glimmer": muse_glimmer,
    "vip llava": other("VipLlava", vision_class="CLIPVisionConfig", image_size=28, patch_size=14),
    "aya vision": other("AyaVision", "Cohere2", **SIGLIP),
    "cohere 2 vision": other("Cohere2Vision", "Cohere2", **SIGLIP),
    "idefics 3": other("Idefics3", image_size=28, patch_size=14),
    "smol vlm": other("SmolVLM", image_size=28, patch_size=14),
    "intern vl": other("InternVL", "Qwen2", image_size=[28, 28], patch_size=[14, 14]),
    "voxtral": other("Voxtral", vision_class="VoxtralEncoderConfig", num_mel_bins=16, max_source_positions=16),
    "qwen 2": qwen("Qwen2VL"),
    "qwen 2.5": qwen("Qwen2_5_VL"),
    "qwen 3": qwen("Qwen3VL"),
    "step 3.7": lambda: transformers.Step3p7ForConditionalGeneration(
        transformers.Step3p7Config(**STEP | {"text_config": STEP["text_config"] | {"vocab_size": TEXT["vocab_size"]}})
    ),
}


def glm_5_3() -> Any:
    vision = {
        "image_size": 28,
        "patch_size": 14,
        "depth": 1,
        "num_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    text = TEXT | LATENT | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "linear_num_heads": 4, "linear_head_dim": 8, "qk_rope_head_dim": 0, "pad_token_id": 2, "hc_mult": 2,
        "index_topk": 8, "index_kpool": 4, "index_n_heads": 8, "index_head_dim": 16, "mlp_layer_types": ["dense"] * 3,
    }  # fmt: skip
    config = transformers.Glm5NextConfig(
        text_config=text, vision_config=vision | {"out_hidden_size": 32, "projection_intermediate_size": 32}
    )
    return transformers.Glm5NextForConditionalGeneration(config)


def inkling() -> Any:
    """Whose embedding and head are stored with rows that stand for no token."""
    text = TEXT | {
        "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 20,
        "d_rel": 4, "rel_extent": 24, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32, "unpadded_vocab_size": 300,
    }  # fmt: skip
    vision, audio = {"hidden_size": 32, "num_hidden_layers": 4, "patch_size": 4}, {"n_mel_bins": 4, "mel_vocab_size": 8}
    tokens = {"image_token_id": 310, "audio_token_id": 311, "image_bos_token_id": 312, "audio_bos_token_id": 313}
    config = transformers.InklingConfig(text_config=text, vision_config=vision, audio_config=audio, **tokens)
    return transformers.InklingForConditionalGeneration(config)


WITH_STATES: dict[str, Callable[[], Any]] = {
    "glm 5.3": glm_5_3,
    "inkling": inkling,
    "qwen 3.5": qwen_3_5("Qwen3_5"),
    "qwen 3.5 with experts": qwen_3_5(
        "Qwen3_5Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen 4": qwen_3_5(
        "Qwen4Exp", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, hc_count=2, hc_lowrank=8, ple_layer_ids=[1], ple_embed_dim=24,
        heads_per_ngram=2, ngram_vocab_size_base=40, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=3,
        indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
    ),
}  # fmt: skip
"""Those whose language models keep a state per sequence."""


def config_of(name: str) -> dict[str, Any]:
    model = MULTIMODAL[name]()
    config: dict[str, Any] = model.config.to_dict()
    return config | {"architectures": [type(model).__name__]}
