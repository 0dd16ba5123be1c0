"""Qwen 3 with experts: Qwen 3's attention, and mixtures."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    experts,
    flag,
    head_dim_of,
    integer,
    llama_like,
    rope,
    sparse_layers,
    used_window,
)


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    bias = flag(config, "attention_bias", False)
    layer = Positions(rope(config, head_dim, 10000.0), used_window(config))
    mixture = experts(
        config,
        integer(config, "moe_intermediate_size", 768),
        renormalise=flag(config, "norm_topk_prob", False),
    )
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        attention={"bias": bias, "output_bias": bias, "qk_norm": "head"},
        ffn=sparse_layers(config, mixture),
        default_context=32768,
    )


FAMILY = Family(("Qwen3MoeForCausalLM",), build, assumes={"use_qk_norm": (True,)})
