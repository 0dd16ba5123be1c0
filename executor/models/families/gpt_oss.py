"""gpt-oss: sliding windows in every other layer, attention sinks, experts with clamped activations and biases."""

from headrace.executor.models.arch import ArchSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    by_type,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    number,
    rope,
)
from headrace.ipc.failure import ModelError

STACKED = StackedExperts(
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj_bias",
    transposed=True,
    alternating=True,
)


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config, 64)
    for key, wanted in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if number(config, key, wanted) != wanted:
            raise ModelError(f"the config's {key} is {config[key]!r}; only {wanted} is supported")
    default = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
    mixture = Experts(
        integer(config, "num_local_experts"),
        Routing(integer(config, "num_experts_per_tok"), "softmax", renormalise=True),
        integer(config, "intermediate_size"),
        "clamped_silu",
        router_bias=True,
        expert_bias=True,
    )
    bias = flag(config, "attention_bias", True)
    types = layer_types(config, num_layers, default)
    return llama_like(
        config,
        positions=by_type(types, rope(config, head_dim, 150000.0), integer(config, "sliding_window", 128)),
        head_dim=head_dim,
        attention={"bias": bias, "output_bias": bias, "sinks": True},
        ffn=mixture,
        names=WeightNames(router="mlp.router"),
        stacked=STACKED,
        default_context=131072,
    )


FAMILY = Family(("GptOssForCausalLM",), build, assumes={"norm_topk_prob": (True,), "hidden_act": ("silu",)})
