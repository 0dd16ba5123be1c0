"""GPT-J: layer norms, partial interleaved rotation (of neighbouring pairs), attention and FFN in parallel."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer, layer_norm, llama_like, plain

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    attention_norm="ln_1",
    mlp_norm="ln_1",
    ignorable=(r"\.attn\.(bias|masked_bias|embed_positions)$",),
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    hidden, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    config = config | {"partial_rotary_factor": integer(config, "rotary_dim", 64) * num_heads / hidden}
    return llama_like(
        config,
        attention={"num_kv_heads": num_heads},
        ffn=plain(config, integer(config, "n_inner", 4 * hidden), "activation_function", "gelu_new"),
        interleaved=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norm_placement="parallel",
        head_bias=True,
        names=NAMES,
    )


FAMILY = Family(("GPTJForCausalLM",), build, assumes={"rotary": (True,)})
