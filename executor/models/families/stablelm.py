"""StableLM 2 and 3B: layer norms, partial rotary positions, query, key and value biases."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import flag, layer_norm, llama_like


def build(config: Config) -> ArchSpec:
    if flag(config, "qk_layernorm", False):
        raise NotNativeError("the config's qk_layernorm is true, and norms that differ by head are not supported")
    is_parallel = flag(config, "use_parallel_residual", False)
    config = {"partial_rotary_factor": 0.25} | config.renamed(
        partial_rotary_factor="rope_pct", layer_norm_eps="norm_eps"
    )
    return llama_like(
        config,
        attention={"bias": flag(config, "use_qkv_bias", False)},
        default_context=4096,
        norm=layer_norm(config),
        norm_placement="parallel" if is_parallel else "pre",
        names=WeightNames(mlp_norm="input_layernorm") if is_parallel else WeightNames(),
    )


FAMILY = Family(("StableLmForCausalLM", "StableLMEpochForCausalLM"), build, assumes={"rotary_scaling_factor": (1.0,)})
