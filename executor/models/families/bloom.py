"""BLOOM: layer norms, ALiBi instead of rotary positions, and normed embeddings."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    alibi_slopes,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
)
from headrace.executor.models.families.falcon import NAMES


def build(config: Config) -> ArchSpec:
    adds_normed = flag(config, "apply_residual_connection_post_layernorm", False)
    config = config.renamed(num_attention_heads="n_head", num_hidden_layers="n_layer", hidden_size="n_embed")
    num_heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    parts = tuple((name, head_dim) for name in (NAMES.query, NAMES.key, NAMES.value))
    return llama_like(
        config | {"num_key_value_heads": num_heads},
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={"bias": True, "output_bias": True, "alibi": alibi_slopes(num_heads)},
        ffn=Dense(4 * integer(config, "hidden_size"), "gelu_tanh", gated=False, bias=True),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norm_placement="normed" if adds_normed else "pre",
        fused=(Fused("self_attention.query_key_value", parts, num_heads),),
        embedding_norm=True,
        names=replace(NAMES, prefixes=("transformer.", "")),
    )


FAMILY = Family(
    ("BloomForCausalLM",),
    build,
    ignored={
        "bias_dropout_fusion": "a kernel of the original code",
        "offset_alibi": "of the original code's layout: its slopes are the same",
        "skip_bias_add": "a kernel of the original code",
        "skip_bias_add_qkv": "a kernel of the original code",
        "n_inner": "the inner size is always four times the hidden size",
    },
    token_classifier="classifier",
)
