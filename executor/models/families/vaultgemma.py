"""VaultGemma: Gemma 2's shape without norms after attention and FFN."""

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    biases,
    by_type,
    dense,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    number,
    optional_number,
    rope,
)


def build(config: Config) -> ArchSpec:
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config, 256)
    default = ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(num_layers)]
    types = layer_types(config, num_layers, default)
    return llama_like(
        config,
        positions=by_type(types, rope(config, head_dim, 10000.0), integer(config, "sliding_window", 4096)),
        head_dim=head_dim,
        tied_head=True,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        attention={
            "scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
            "soft_cap": optional_number(config, "attn_logit_softcapping"),
            **biases(config, "attention_bias", False),
        },
        ffn=dense(config, "hidden_activation", "gelu_pytorch_tanh"),
        final_soft_cap=optional_number(config, "final_logit_softcapping"),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        names=WeightNames(mlp_norm="pre_feedforward_layernorm"),
    )


FAMILY = Family(("VaultGemmaForCausalLM",), build)
