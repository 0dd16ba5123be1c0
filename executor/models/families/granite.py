"""Granite 3: Llama's shape with multipliers of embeddings, attention, residuals and logits."""

from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, flag, llama_like, positive


def multipliers(config: Config) -> dict[str, Any]:
    """Fields of `ArchSpec` that all of the Granite families have."""
    return {
        "embedding_scale": positive(config, "embedding_multiplier", 1.0),
        "scales_given": True,
        "residual_scale": positive(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / positive(config, "logits_scaling", 1.0),
    }


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention={"scale": positive(config, "attention_multiplier", 1.0), **biases(config, "attention_bias", False)},
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        **multipliers(config),
    )


FAMILY = Family(("GraniteForCausalLM",), build)
