"""Qwen 1.5 and 2 with experts: Qwen 2's attention, and mixtures with a gated shared expert."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    experts,
    flag,
    head_dim_of,
    integer,
    llama_like,
    qwen_moe_positions,
    rope,
    sparse_layers,
)


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    mixture = experts(
        config,
        integer(config, "moe_intermediate_size", 1408),
        renormalise=flag(config, "norm_topk_prob", False),
        shared_inner=integer(config, "shared_expert_intermediate_size", 5632),
    )
    return llama_like(
        config,
        positions=qwen_moe_positions(config, rope(config, head_dim, 10000.0)),
        head_dim=head_dim,
        attention={"bias": flag(config, "qkv_bias", True)},
        ffn=sparse_layers(config, mixture),
        default_context=32768,
    )


FAMILY = Family(
    ("Qwen2MoeForCausalLM",),
    build,
    ignored={"attention_bias": "which matrices have biases does not differ between its models"},
)
