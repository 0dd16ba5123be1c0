"""GPT-2 and models like it: layer norms, learned positions, biases, matrices stored transposed.

The spec names its matrices differently from the transposed ones of published checkpoints, since a GGUF file holds them
not transposed.
"""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    plain,
)

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layers="h",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    query="attn.q",
    key="attn.k",
    value="attn.v",
    output="attn.out",
    up="mlp.up",
    down="mlp.down",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignorable=(r"\.attn\.(bias|masked_bias)$",),
)
COMMON_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def build(config: Config) -> ArchSpec:
    config = config.renamed(**COMMON_NAMES)
    hidden, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    inner = integer(config, "n_inner", 4 * hidden)
    scale = head_dim_of(config) ** -0.5 if flag(config, "scale_attn_weights", True) else 1.0
    spec = llama_like(
        config,
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={
            "num_kv_heads": num_heads,
            "bias": True,
            "output_bias": True,
            "scale": scale,
        },
        ffn=plain(config, inner, "activation_function", "gelu_new"),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        learned_position_offset=0,
        fused=(
            Fused("attn.c_attn", tuple((name, hidden) for name in (NAMES.query, NAMES.key, NAMES.value)), 1, True),
            Fused("attn.c_proj", ((NAMES.output, hidden),), 1, True),
            Fused("mlp.c_fc", ((NAMES.up, inner),), 1, True),
            Fused("mlp.c_proj", ((NAMES.down, hidden),), 1, True),
        ),
        names=NAMES,
    )
    if not flag(config, "scale_attn_by_inverse_layer_idx", False):
        return spec
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    layers = [replace(layer, mixer=replace(mixer, scale=scale / number)) for number, layer in enumerate(spec.layers, 1)]
    return replace(spec, layers=tuple(layers))


FAMILY = Family(("GPT2LMHeadModel",), build, token_classifier="classifier")
