"""Qwen 1: Llama's shape under GPT-2's names, with fused projections that have biases.

Contexts are limited to the trained length, within which its dynamic rotation and its logarithmic scaling of queries
change nothing; neither is implemented.
"""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, llama_like

NAMES = WeightNames(
    prefixes=("transformer.",),
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    query="attn.q",
    key="attn.k",
    value="attn.v",
    output="attn.c_proj",
    gate="mlp.w2",
    up="mlp.w1",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignorable=(*WeightNames.ignorable, r"^transformer\.visual\."),
)


def build(config: Config) -> ArchSpec:
    num_heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    own = {"rope_theta": "rotary_emb_base", "rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels"}
    config = config.renamed(partial_rotary_factor="rotary_pct", **own)
    lengths = [integer(config, key) for key in ("seq_length", "max_position_embeddings") if config.get(key) is not None]
    config = config | {"max_position_embeddings": min(lengths, default=None)}  # the trained one
    inner = num_heads * integer(config, "head_dim", hidden // max(1, num_heads))
    return llama_like(
        config,
        attention={"num_kv_heads": num_heads, "bias": True, "output_bias": not flag(config, "no_bias", True)},
        ffn=Dense(integer(config, "intermediate_size") // 2, "silu", bias=not flag(config, "no_bias", True)),
        default_context=8192,
        fused=(Fused("attn.c_attn", tuple((name, inner) for name in (NAMES.query, NAMES.key, NAMES.value))),),
        names=NAMES,
    )


FAMILY = Family(
    ("QWenLMHeadModel",),
    build,
    ignored={
        "use_dynamic_ntk": "contexts are limited to the trained length, within which it changes nothing",
        "use_logn_attn": "contexts are limited to the trained length, within which it changes nothing",
    },
)
