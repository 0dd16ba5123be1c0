"""TeleChat 2: Llama's shape under Bloom's names, with keys and values fused by head and biases of what writes to the
stream.

Contexts are limited to the trained length, within which its dynamic rotation changes nothing; it is not implemented.
"""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, head_dim_of, integer, llama_like

NAMES = WeightNames(
    prefixes=("transformer.", "model."),
    layers="h",
    embedding="word_embeddings",
    final_norm="ln_f",
    query="self_attention.query",
    key="self_attention.key",
    value="self_attention.value",
    output="self_attention.dense",
)
DEFAULT_LENGTH = 8192


def build(config: Config) -> ArchSpec:
    config = {"rms_norm_eps": 1e-5} | config.renamed(
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layer_norm_epsilon",
    )
    lengths = [integer(config, key, DEFAULT_LENGTH) for key in ("training_seqlen", "max_position_embeddings")]
    config = config | {"max_position_embeddings": min(lengths)}
    head_dim, heads = head_dim_of(config), integer(config, "num_attention_heads")
    groups = max(1, integer(config, "num_key_value_heads", heads))
    ffn = dense(config, "hidden_act", "silu")
    return llama_like(
        config,
        attention={"output_bias": True},
        ffn=replace(ffn, down_bias=True),
        fused=(Fused("self_attention.key_value", ((NAMES.key, head_dim), (NAMES.value, head_dim)), groups),),
        names=NAMES,
    )


FAMILY = Family(
    ("TeleChat2ForCausalLM",),
    build,
    ignored={
        "base_seqlen": "contexts are limited to the trained length, within which no rotation changes",
        "offset_alibi": "of the original code's layout: nothing is biased by distance",
        "skip_bias_add": "a kernel of the original code",
        "skip_bias_add_qkv": "a kernel of the original code",
    },
    assumes={
        "apply_residual_connection_post_layernorm": (False,),
        "embed_layernorm": (False,),
        "logn": (False,),
        "rotary_use_xpos": (False,),
        "use_RMSNorm": (True,),
    },
)
