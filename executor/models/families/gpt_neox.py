"""GPT-NeoX and Pythia: layer norms, biases, partial rotary positions, attention and FFN in parallel."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    biases,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    plain,
)

NAMES = WeightNames(
    prefixes=("gpt_neox.",),
    lm_heads=("embed_out", "lm_head"),
    embedding="embed_in",
    final_norm="final_layer_norm",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignorable=(r"rotary_emb\.inv_freq$", r"attention\.(bias|masked_bias)$"),
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    config = {"partial_rotary_factor": 0.25} | config
    num_heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    parts = tuple((name, head_dim) for name in (NAMES.query, NAMES.key, NAMES.value))
    return llama_like(
        config,
        attention={"num_kv_heads": num_heads, **biases(config, "attention_bias", True)},
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "gelu"),
        norm=layer_norm(config),
        norm_placement="parallel" if flag(config, "use_parallel_residual", True) else "pre",
        fused=(Fused("attention.query_key_value", parts, num_heads),),
        names=NAMES,
    )


FAMILY = Family(("GPTNeoXForCausalLM",), build, token_classifier="classifier")
