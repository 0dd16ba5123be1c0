"""Falcon (FalconForCausalLM): layer norms, one or a few key/value heads, attention and FFN in parallel or in order."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    alibi_slopes,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    optional_integer,
    plain,
)

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layers="h",
    embedding="word_embeddings",
    final_norm="ln_f",
    query="self_attention.query",
    key="self_attention.key",
    value="self_attention.value",
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(num_attention_heads="n_head", num_hidden_layers="n_layer")
    num_heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    own_groups = optional_integer(config, "n_head_kv")  # in RefinedWeb's configs, before the architecture had a name
    config = config.renamed(num_kv_heads="n_head_kv")
    is_new = flag(config, "new_decoder_architecture", own_groups is not None)
    if is_new:
        groups = integer(config, "num_kv_heads", num_heads)
    else:
        groups = 1 if flag(config, "multi_query", True) else num_heads
    is_parallel = is_new or flag(config, "parallel_attn", True)
    names = NAMES
    if is_new and config.get("num_ln_in_parallel_attn") in (None, 2):
        names = replace(NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")
    elif is_parallel:
        names = replace(NAMES, mlp_norm="input_layernorm")
    bias = flag(config, "bias", False)
    parts = ((NAMES.query, num_heads // max(groups, 1) * head_dim), (NAMES.key, head_dim), (NAMES.value, head_dim))
    alibi: tuple[float, ...] = ()
    positions = None
    if flag(config, "alibi", False):  # Falcon scales the biases like the scores
        alibi = alibi_slopes(num_heads, head_dim**-0.5)
        positions = [Positions(None)] * integer(config, "num_hidden_layers")
    inner = integer(config, "ffn_hidden_size", 4 * integer(config, "hidden_size"))
    return llama_like(
        config | {"num_key_value_heads": groups},
        positions=positions,
        attention={"bias": bias, "output_bias": bias, "alibi": alibi},
        ffn=plain(config, inner, "activation", "gelu", bias=bias),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norm_placement="parallel" if is_parallel else "pre",
        fused=(Fused("self_attention.query_key_value", parts, groups),),
        names=names,
    )


FAMILY = Family(
    ("FalconForCausalLM", "RWForCausalLM"),
    build,
    ignored={
        "multi_query": "of the old decoder architecture",
        "parallel_attn": "of the old decoder architecture",
        "num_ln_in_parallel_attn": "of the new decoder architecture",
    },
    assumes={"apply_residual_connection_post_layernorm": (False,)},
    token_classifier="classifier",
)
