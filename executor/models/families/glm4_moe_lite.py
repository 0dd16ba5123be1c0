"""GLM 4.7 Flash: DeepSeek V3's shape."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, integer, optional_integer
from headrace.executor.models.families._latent import deepseek
from headrace.ipc.failure import ModelError


def build(config: Config) -> ArchSpec:
    num_layers, first = integer(config, "num_hidden_layers"), optional_integer(config, "first_k_dense_replace")
    types = config.get("mlp_layer_types") or [*["dense"] * (1 if first is None else first)] + ["sparse"] * num_layers
    types = types[:num_layers]
    num_dense = types.count("dense")
    if first not in (None, num_dense):
        raise ModelError(
            f"the config's first_k_dense_replace is {first}, and its mlp_layer_types have {num_dense} dense"
        )
    if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise ModelError(f"the config's mlp_layer_types must be some of dense, then sparse, {num_layers} in all")
    return deepseek(config | {"first_k_dense_replace": num_dense}, corrected_routing(config), correction=True)


FAMILY = Family(
    ("Glm4MoeLiteForCausalLM",), build, assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc")}
)
