"""Gemma 2: norms before and after each block, sliding windows in every other layer, soft caps on scores and logits."""

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    by_type,
    dense,
    flag,
    integer,
    layer_types,
    llama_like,
    number,
    optional_number,
    rope,
)


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim", 256)
    rotary = rope(config, head_dim, 10000.0)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = integer(config, "sliding_window", 4096)
    types = layer_types(config, num_layers, default)
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        positions=by_type(types, rotary, window),
        head_dim=head_dim,
        tied_head=True,
        default_context=8192,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        norm_placement="sandwich",
        attention={
            "scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
            "bias": bias,
            "output_bias": bias,
            "soft_cap": optional_number(config, "attn_logit_softcapping"),
        },
        ffn=dense(config, "hidden_activation", "gelu_pytorch_tanh"),
        final_soft_cap=optional_number(config, "final_logit_softcapping"),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        names=WeightNames(mlp_norm="pre_feedforward_layernorm"),
    )


FAMILY = Family(("Gemma2ForCausalLM",), build)
