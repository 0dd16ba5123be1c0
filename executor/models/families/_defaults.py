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
                *(
                    "HYV4",
                    "InternLM3",
                    "KimiLinear",
                    "Llama4",
                    "MiniCPM3",
                    "Ministral3",
                    "Mixtral",
                    "Olmo2",
                    "Olmo3",
                    "Olmoe",
                ),
                *("HYV3", "Phi3", "SolarOpen", "Zamba2"),
            ),
            1e-6: ("GraniteMoeHybrid",),
            1.5625e-7: ("Glm", "Glm4"),
            1e-8: ("Helium",),
        },
        "rope_theta": {
            100_000.0: ("Helium",),
            500_000.0: ("Cohere", "Ernie4_5", "Ernie4_5_Moe", "FlexOlmo"),
            1_000_000.0: ("SolarOpen",),
            5_000_000.0: ("MiniMaxM2",),
            11_158_840.0: ("HYV3",),
        },
        "routed_scaling_factor": {
            1.8: ("Glm4MoeLite",),
            2.0: ("MiniMaxM3VL",),
            2.446: ("KimiLinear",),
            2.5: ("DeepseekV3",),
            2.827: ("HYV4",),
            6.0: ("LongcatFlash",),
        },
        "sliding_window": {
            128: ("GptOss", "GraniteSWA", "GraniteMoeSWA"),
            512: ("Gemma3n", "Gemma4"),
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
_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base")


def defaults_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the config lacks; null is a value, which says that there is none."""
    if any(name in config for name in _ROTATION):
        config = {**config, **dict.fromkeys(_ROTATION)}
    own = architecture.removesuffix("ForCausalLM")
    return {
        name: value
        for name, values in _DEFAULTS.items()
        for value, architectures in values.items()
        if name not in config and own in architectures
    }
