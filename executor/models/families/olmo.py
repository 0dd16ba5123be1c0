"""OLMo 1: Llama's shape with layer norms that have no weights."""

from headrace.executor.models.arch import ArchSpec, NormSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, llama_like, optional_number


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention={"clip_qkv": optional_number(config, "clip_qkv"), **biases(config, "attention_bias", False)},
        norm=NormSpec("layer", 1e-5, affine=False),
    )


FAMILY = Family(
    ("OlmoForCausalLM",),
    build,
    assumes={
        "layer_norm_eps": (1e-05,),
        "layer_norm_epsilon": (1e-05,),
        "norm_epsilon": (1e-05,),
        "norm_eps": (1e-05,),
    },
)
