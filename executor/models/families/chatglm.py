"""ChatGLM 2 and 3, and GLM 4 as its authors first published it: GLM 4's shape under names of its own."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import biases, dense, flag, head_dim_of, integer, llama_like, number

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    lm_heads=("transformer.output_layer", "output_layer"),
    layers="encoder.layers",
    embedding="embedding.word_embeddings",
    final_norm="encoder.final_layernorm",
    query="self_attention.query",
    key="self_attention.key",
    value="self_attention.value",
    output="self_attention.dense",
    down="mlp.dense_4h_to_h",
    ignorable=(r"rotary_pos_emb\.inv_freq$",),
)
OTHER_NAMES = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon",
    "vocab_size": "padded_vocab_size",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
}


def build(config: Config) -> ArchSpec:
    config = config.renamed(**OTHER_NAMES)
    if not flag(config, "original_rope", True):
        raise NotNativeError("the config's original_rope is false, and the rotation of half heads is not supported")
    heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    shares = flag(config, "multi_query_attention", False)
    kv_heads = integer(config, "multi_query_group_num", heads) if shares else heads
    inner = integer(config, "intermediate_size")
    attention = biases(config, "add_bias_linear", False)
    qkv_bias = flag(config, "add_qkv_bias", attention["bias"])
    parts = ((NAMES.query, heads * head_dim), (NAMES.key, kv_heads * head_dim), (NAMES.value, kv_heads * head_dim))
    own = {
        "num_key_value_heads": kv_heads,
        "rope_theta": 10_000.0 * number(config, "rope_ratio", 1.0),
        "partial_rotary_factor": 0.5,
    }
    return llama_like(
        config | own,
        head_dim=head_dim,
        attention=attention | {"bias": qkv_bias},
        ffn=dense(config, bias=flag(config, "add_bias_linear", False)),
        interleaved=True,
        names=NAMES,
        fused=(
            Fused("self_attention.query_key_value", parts),
            Fused("mlp.dense_h_to_4h", ((NAMES.gate, inner), (NAMES.up, inner))),
        ),
    )


FAMILY = Family(
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    build,
    ignored={
        "apply_query_key_layer_scaling": "precision of the original code",
        "fp32_residual_connection": "precision of the original code",
        "multi_query_group_num": "multi_query_attention says whether it holds",
        "pre_seq_len": "of prefixes that are trained beside it",
        "prefix_projection": "of prefixes that are trained beside it",
    },
    assumes={
        "apply_residual_connection_post_layernorm": (False,),
        "interleaved_qkv": (False,),
        "post_layer_norm": (True,),
        "quantization_bit": (0,),
        "rmsnorm": (True,),
    },
)
