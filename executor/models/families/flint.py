"""Flint: Qwen 3's attention with sinks, rotated in its sliding windows alone, and experts with sigmoid scores beside a
shared one."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    activation,
    biases,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    rope,
    sparse_layers,
)

NAMES = WeightNames(renamed=((r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),))


def build(config: Config) -> ArchSpec:
    config = {"mlp_only_layers": [0, 1], "decoder_sparse_step": 1, "num_key_value_heads": 4} | config
    count, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config, 128)
    full = {0, 1, count - 1, *range(1, count, 4)}
    default = ["full_attention" if index in full else "sliding_attention" for index in range(count)]
    sliding = Positions(rope(config, head_dim, 10_000.0), integer(config, "sliding_window", 513))
    types = layer_types(config, count, default)
    mixture = Experts(
        integer(config, "num_experts", 256),
        Routing(integer(config, "num_experts_per_tok", 6), "sigmoid", renormalise=flag(config, "norm_topk_prob", True)),
        integer(config, "moe_intermediate_size", 512),
        activation(config, "hidden_act", "silu"),
        shared_inner=integer(config, "shared_expert_intermediate_size", 1024),
        shared_gate=False,
    )
    return llama_like(
        config,
        positions=[sliding if kind == "sliding_attention" else Positions(None) for kind in types],
        head_dim=head_dim,
        attention={"qk_norm": "head", "sinks": True, **biases(config, "attention_bias", False)},
        ffn=sparse_layers(config, mixture),
        default_context=262_144,
        names=NAMES,
    )


FAMILY = Family(("FlintForCausalLM",), build)
