"""Mixtral: Mistral's shape with experts; the weights of the chosen ones are renormalised."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    experts,
    head_dim_of,
    integer,
    llama_like,
    optional_integer,
    rope,
)

NAMES = WeightNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    renamed=((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),  # transformers' module
)


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    layer = Positions(rope(config, head_dim, 1e6), optional_integer(config, "sliding_window"))
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        ffn=experts(config, integer(config, "intermediate_size"), renormalise=True),
        default_context=131072,
        names=NAMES,
    )


FAMILY = Family(("MixtralForCausalLM",), build, assumes={"norm_topk_prob": (True,)})
