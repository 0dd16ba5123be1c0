"""The language models of multimodal checkpoints, each of another family. Media are refused: the towers that read them
are not loaded. Gemma 3, Gemma 3n and Llama 4 read such checkpoints of theirs by themselves.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, named_architecture, spec_from_config
from headrace.executor.models.families._model_types import MODEL_TYPES
from headrace.ipc.failure import ModelError

ARCHITECTURES = (
    *("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    *(
        "Glm5NextForConditionalGeneration",
        "HCXVisionV2ForCausalLM",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "InternVLChatModel",
        "InternVLForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
    ),
    *("Kimi_K25ForConditionalGeneration", "LlavaForConditionalGeneration"),
    *("LlavaNextForConditionalGeneration", "LlavaNextVideoForConditionalGeneration"),
    *("LlavaOnevisionForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("MuseGlimmerForConditionalGeneration",),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration"),
    *("SmolVLMForConditionalGeneration", "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration"),
)
QWEN = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
"""Those whose language model has a name of its own, and whose older configs have its fields among the others."""
SECTIONS = ("text_config", "llm_config")
OTHER_MEDIA = (
    r"(^|\.)(discrete_)?(vision|audio|image)_(tower|model|encoder)\.",
    r"^(model\.)?visual\.",
    r"^(model\.)?(multi_modal_projector|mm_projector|connector|image_newline|mlp1|vision_adapter|vision_projection)(\.|$)",
    r"^(model\.)?(vision|audio|video_audio)_(projector|compressor)\.",
)
BELOW = ("model.language_model.", "model.language_model.model.", "model.text_model.")
# What transformers' classes fill in, since many configs leave it out.
_LLAMA = {"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA | {"intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": _LLAMA
    | {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
    | {"sliding_window": 4096},
    "qwen2": _LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
}
_OF_IMAGES = (
    *("dynamic_image_size", "force_image_size", "ignore_index", "max_dynamic_patch", "min_dynamic_patch", "pad2square"),
    *("ps_version", "scale_factor", "select_layer", "use_thumbnail", "media_placeholder_token_id"),
    *(
        "out_hidden_size",
        "projection_hidden_size",
        "projector_hidden_size",
        "projection_layer_norm_eps",
        "use_unified_vision_chunk",
        "video_placeholder",
    ),
)
_SAID_OF_TEXT = ("hidden_size", "max_position_embeddings", "vocab_size")
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(_OF_IMAGES, "of images"),
    **dict.fromkeys(("use_backbone_lora", "use_llm_lora", "template"), "of its training"),
    **dict.fromkeys(_SAID_OF_TEXT, "the language model's own section has it"),
}


def build(config: Config) -> ArchSpec:
    outer = config["architectures"][0]
    section = next((key for key in SECTIONS if config.get(key)), None)
    if section is None and outer not in QWEN:
        raise ModelError(f"the config of this {outer} has no text_config, which describes its language model")
    text = dict(config) if section is None else dict(config.section(section))
    if section is not None and config.stores("tie_word_embeddings"):  # which transformers reads, not the section's
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    kind = text.get("model_type") or "llama"
    text = {**DEFAULTS.get(kind, {}), **text}
    text["architectures"] = [QWEN.get(outer) or _architecture_of(text, kind)]
    spec = spec_from_config(_with_plain_positions(text), config.warns)
    names = spec.names
    inner = tuple(f"language_model.{prefix}" for prefix in names.prefixes)
    heads = tuple(f"{start}language_model.{head}" for head in names.lm_heads for start in ("", "model."))
    return replace(
        spec,
        architecture=outer,
        names=replace(
            names,
            prefixes=(*inner, *BELOW, *names.prefixes),
            lm_heads=(*names.lm_heads, *heads),
            ignorable=(*names.ignorable, *OTHER_MEDIA),
        ),
    )


def _architecture_of(text: Mapping[str, Any], kind: str) -> str:
    """The architecture that the section names, if a family has it, else that of its model_type."""
    of_type = [MODEL_TYPES[kind]] if kind in MODEL_TYPES else []
    return named_architecture({"architectures": [*(text.get("architectures") or []), *of_type], "model_type": kind})


def _with_plain_positions(text: dict[str, Any]) -> dict[str, Any]:
    """The config without what rotates the parts of a head by an image's time, height and width: these are equal for
    text, which is rotated as by one position."""
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if isinstance(given, Mapping) and given.get("mrope_section"):
            kept = {name: value for name, value in given.items() if not name.startswith("mrope_")}
            text = {**text, key: {name: value for name, value in kept.items() if value != "mrope"}}
    return text


FAMILY = Family(ARCHITECTURES, build, ignored=IGNORED)
