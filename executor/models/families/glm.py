"""GLM 4 9B (glm-4-9b-chat-hf): Llama's shape with interleaved rotation (of neighbouring pairs) of half of each head."""

from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, head_dim_of, integer, llama_like

NAMES = WeightNames(ignorable=(r"rotary_emb\.inv_freq$",))


def build(config: Config) -> ArchSpec:
    return glm_like(config)


def glm_like(config: Config, **overrides: Any) -> ArchSpec:
    """GLM 4's projections. overrides: fields of ArchSpec."""
    inner = integer(config, "intermediate_size")
    return llama_like(
        {"partial_rotary_factor": 0.5} | config,
        head_dim=head_dim_of(config),
        attention={"bias": flag(config, "attention_bias", False)},
        interleaved=True,
        fused=(Fused("mlp.gate_up_proj", (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),),
        **({"names": NAMES} | overrides),
    )


FAMILY = Family(("GlmForCausalLM",), build)
