"""Command R: layer norms without biases, interleaved rotation (neighbouring pairs), attention and FFN in parallel."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import biases, flag, integer, layer_norm, llama_like, positive

NAMES = WeightNames(mlp_norm="input_layernorm")


def build(config: Config) -> ArchSpec:
    if flag(config, "use_qk_norm", False):
        raise NotNativeError("the config's use_qk_norm is true, and norms that differ by head are not supported")
    return llama_like(
        config,
        attention=biases(config, "attention_bias", False),
        max_positions=integer(config, "model_max_length", integer(config, "max_position_embeddings", 8192)),
        tied_head=True,
        interleaved=True,
        norm=layer_norm(config, bias=False),
        norm_placement="parallel",
        logit_scale=positive(config, "logit_scale", 0.0625),
        names=NAMES,
    )


FAMILY = Family(("CohereForCausalLM",), build)
