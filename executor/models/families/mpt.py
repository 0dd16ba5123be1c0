"""MPT: layer norms without biases, ALiBi instead of rotary positions."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    alibi_slopes,
    flag,
    integer,
    layer_norm,
    llama_like,
    number,
    optional_number,
)

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layers="blocks",
    embedding="wte",
    final_norm="norm_f",
    attention_norm="norm_1",
    mlp_norm="norm_2",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


def build(config: Config) -> ArchSpec:
    own = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }
    config, attention = config.renamed(**own), config.section("attn_config")
    if not flag(attention, "alibi", True) or flag(attention, "qk_ln", False):
        raise NotNativeError("the config's attn_config is without alibi or with qk_ln, which are not supported")
    if (steepest := number(attention, "alibi_bias_max", 8)) != 8:
        raise NotNativeError(f"the config's alibi_bias_max is {steepest}; only 8 is supported")
    if (kind := attention.get("attn_type", "multihead_attention")) not in (None, "multihead_attention"):
        raise NotNativeError(f"the config's attn_type is {kind!r}; only multihead_attention is supported")
    config.section("ffn_config")  # of which `assumes` has what is supported
    clip = optional_number(attention, "clip_qkv")
    hidden, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    scale = optional_number(attention, "softmax_scale") or (hidden / max(1, num_heads)) ** -0.5
    return llama_like(
        config | {"num_key_value_heads": num_heads},
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={"scale": scale, "alibi": alibi_slopes(num_heads), "clip_qkv": clip or None},
        ffn=Dense(int(number(config, "expansion_ratio", 4) * hidden), "gelu", gated=False),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon", bias=False),
        fused=(Fused("attn.Wqkv", tuple((name, hidden) for name in (NAMES.query, NAMES.key, NAMES.value))),),
        names=NAMES,
    )


FAMILY = Family(
    ("MptForCausalLM", "MPTForCausalLM"),
    build,
    ignored={
        "learned_pos_emb": "with ALiBi there is no table of positions",
        "attn_uses_sequence_id": "several sequences in one row, in training",
        "fc_type": "a kernel of the original code",
    },
    assumes={
        "ffn_type": ("mptmlp",),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "prefix_lm": (False,),
    },
    token_classifier="classifier",
)
