"""Tele-FLM: Llama's shape, with multipliers of embeddings and logits from its training (muP)."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, llama_like, positive


def build(config: Config) -> ArchSpec:
    if not flag(config, "use_mup", False):
        return llama_like(config)
    return llama_like(
        config,
        embedding_scale=positive(config, "input_mult", 1.0),
        scales_given=True,
        logit_scale=positive(config, "output_mult", 1.0) / positive(config, "mup_scale_factor", 1.0),
    )


FAMILY = Family(("TeleFLMForCausalLM",), build)
