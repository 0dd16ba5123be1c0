"""Persimmon: layer norms, also of each head's query and key, partial rotary positions, a squared ReLU without gate."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, head_dim_of, integer, layer_norm, llama_like, plain

NAMES = WeightNames(
    final_norm="final_layernorm",
    output="self_attn.dense",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def build(config: Config) -> ArchSpec:
    config = {"partial_rotary_factor": 0.5} | config
    num_heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    parts = tuple((name, head_dim) for name in (NAMES.query, NAMES.key, NAMES.value))
    return llama_like(
        config,
        attention={
            "num_kv_heads": num_heads,
            "bias": True,
            "output_bias": True,
            "qk_norm": "head" if flag(config, "qk_layernorm", True) else "no",
        },
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "relu2"),
        default_context=16384,
        norm=layer_norm(config),
        fused=(Fused("self_attn.query_key_value", parts, num_heads),),
        names=NAMES,
    )


FAMILY = Family(("PersimmonForCausalLM",), build)
