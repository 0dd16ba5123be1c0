"""Phi 1, 1.5 and 2: layer norms, partial rotary positions, attention and FFN in parallel, biases everywhere."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import flag, integer, layer_norm, llama_like, plain

NAMES = WeightNames(
    final_norm="final_layernorm",
    output="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_norm="input_layernorm",
)


def build(config: Config) -> ArchSpec:
    if flag(config, "qk_layernorm", False):
        raise NotNativeError("the config's qk_layernorm is true, and layer norms of queries and keys are not supported")
    return llama_like(
        {"partial_rotary_factor": 0.5} | config,
        attention={"bias": True, "output_bias": True},
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "gelu_new"),
        norm=layer_norm(config),
        norm_placement="parallel",
        head_bias=True,
        names=NAMES,
    )


FAMILY = Family(("PhiForCausalLM",), build)
