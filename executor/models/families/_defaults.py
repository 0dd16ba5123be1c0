"""What transformers' classes of configs have for fields that a file leaves out, where the families' readers, which many
share, have something else. Fields that decide shapes are not here: without them the weights do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_DEFAULTS: Mapping[str, Mapping[float, tuple[str, ...]]] = MappingProxyType(
    {
        "rms_norm_eps": {
            1e-5: (
                *("Apertus", "Arcee", "Bamba", "Cwm", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "FalconH1"),
                *("Glm4MoeLite", "GlmMoeDsa", "GptOss", "GraniteSWA", "HunYuanDenseV1", "HunYuanMoEV1", "IQuestCoder"),
                *("HYV3", "HYV4", "InternLM3", "KimiLinear", "Llama4", "MiniCPM3", "Ministral3", "Mixtral", "Olmo2"),
                *("Olmo3", "Olmoe", "Phi3", "SolarOpen", "Zamba2"),
            ),
            1e-6: ("GraniteMoeHybrid",),
            1.5625e-7: ("Glm", "Glm4"),
            1e-8: ("Helium",),
        },
        "rope_theta": {
            10_000.0: ("Exaone4", "ExaoneMoe"),
            100_000.0: ("Helium",),
            500_000.0: ("Cohere", "Ernie4_5", "Ernie4_5_Moe", "Exaone", "FlexOlmo", "Olmo3"),
            1_000_000.0: ("SolarOpen",),
            5_000_000.0: ("MiniMaxM2", "MiniMaxM3VL"),
            6_000_000.0: ("BailingHybrid",),
            11_158_840.0: ("HYV3",),
        },
        "routed_scaling_factor": {
            1.8: ("Glm4MoeLite",),
            2.0: ("MiniMaxM3VL",),
            2.446: ("KimiLinear",),
            2.5: ("DeepseekV3",),
            2.827: ("HYV4",),
            6.0: ("LongcatFlash", "LongcatFlashNgram"),
        },
        "max_position_embeddings": {
            4096: ("DeepseekV3", "Exaone", "SarvamMLA"),
            8192: ("GraniteSWA", "VaultGemma"),
            32_768: ("AXK1", "MiniCPM3"),
            131_072: (
                "Glm",
                "Glm4",
                "IQuestCoder",
                "LongcatFlash",
                "LongcatFlashNgram",
                "MiMoV2Flash",
                "SarvamMoE",
                "Youtu",
            ),
            163_840: ("DeepseekV32",),
            196_608: ("MiniMaxM2",),
            202_752: ("Glm4MoeLite", "GlmMoeDsa"),
            262_144: ("HYV4",),
            524_288: ("MiniMaxM3VL",),
        },
        "model_max_length": {262_144: ("BailingHybrid",)},
        "n_group": {8: ("DeepseekV3",)},
        "topk_group": {4: ("DeepseekV3",)},
        "scale_emb": {12: ("MiniCPM3",)},
        "scale_depth": {1.4: ("MiniCPM3",)},
        "dim_model_base": {256: ("MiniCPM3",)},
        "tie_word_embeddings": {True: ("GraniteSWA",)},
        "sliding_window": {
            128: ("GptOss", "GraniteSWA", "GraniteMoeSWA"),
            512: ("Gemma3n", "Gemma4"),
            2047: ("Solar",),
            4096: (
                *("Cohere2", "Dots1", "Exaone4", "ExaoneMoe", "Gemma2", "Gemma3", "Ministral", "Mistral", "Olmo3"),
                "VaultGemma",
            ),
            8192: ("Cwm",),
        },
        "attn_logit_softcapping": {50.0: ("Gemma2", "VaultGemma")},
        "final_logit_softcapping": {30.0: ("Gemma2", "VaultGemma")},
    }
)
"""By field and value, the architectures without their ending."""
_THETA = ("rope_theta", "rotary_emb_base")
_SECTIONS = ("rope_parameters", "rope_scaling")
_ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Apertus": {
            "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "Cwm": {
            "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "GptOss": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    }
)  # fmt: skip
"""The scaling of classes whose models all have it, by architecture."""


def scales_by_default(architecture: str) -> bool:
    """Whether a config of the architecture that says nothing of a rotation's scaling has one."""
    return architecture.removesuffix("ForCausalLM") in _ROPES


def says_rope(config: Mapping[str, Any]) -> bool:
    """Whether the config says how its positions rotate. An empty `rope_parameters` says that nothing is scaled, as in
    transformers; an empty `rope_scaling` says nothing."""
    return bool(config.get("rope_scaling")) or config.get("rope_parameters") is not None


def defaults_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the config lacks. null is a value, which says that there is none; but there is no model without a
    rotation's base, and a scaling that is left out is null in files of other classes."""
    own = architecture.removesuffix("ForCausalLM")
    sections = [config[name] for name in _SECTIONS if isinstance(config.get(name), Mapping) and config[name]]
    found: dict[str, Any] = {}
    if not says_rope(config) and own in _ROPES:
        found["rope_parameters"] = dict(_ROPES[own])
        sections = [_ROPES[own]]
    has_theta = any(section.get(name) is not None for name in _THETA for section in (config, *sections))
    by_type = any(isinstance(each, Mapping) for section in sections for each in section.values())
    if own in _ROPES and not (has_theta or by_type):
        found["rope_theta"] = _ROPES[own]["rope_theta"]
    for name, values in _DEFAULTS.items():
        given = has_theta or by_type if name == "rope_theta" else name in config
        if not given:
            found.update((name, value) for value, architectures in values.items() if own in architectures)
    return found
