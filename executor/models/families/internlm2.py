"""InternLM 2 and 2.5: Llama's shape under other names, with queries, keys and values fused by key/value head."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, head_dim_of, integer, llama_like

NAMES = WeightNames(
    lm_heads=("output", "lm_head"),
    embedding="tok_embeddings",
    query="attention.wq",
    key="attention.wk",
    value="attention.wv",
    output="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
)


def build(config: Config) -> ArchSpec:
    num_heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    groups = max(1, integer(config, "num_key_value_heads", num_heads))
    parts = ((NAMES.query, num_heads // groups * head_dim), (NAMES.key, head_dim), (NAMES.value, head_dim))
    return llama_like(
        config,
        attention=biases(config, "bias", False),
        fused=(Fused("attention.wqkv", parts, groups),),
        names=NAMES,
    )


FAMILY = Family(("InternLM2ForCausalLM",), build)
