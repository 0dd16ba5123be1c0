"""BioGPT: OPT's shape with scaled embeddings and a final norm of its own."""

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import Positions, flag, integer, llama_like, plain

NAMES = WeightNames(
    prefixes=("biogpt.", ""),
    lm_heads=("output_projection",),
    final_norm="layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
)
POSITION_OFFSET = 2  # rows 0 and 1 of the position table are for padding


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={"num_kv_heads": integer(config, "num_attention_heads"), "bias": True, "output_bias": True},
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "gelu"),
        tied_head=True,
        norm=NormSpec("layer", 1e-5),
        embedding_scale=integer(config, "hidden_size") ** 0.5 if flag(config, "scale_embedding", True) else 1.0,
        learned_position_offset=POSITION_OFFSET,
        names=NAMES,
    )


FAMILY = Family(
    ("BioGptForCausalLM",),
    build,
    ignored={"layer_norm_eps": "the model's code norms with 1e-5 whatever it says"},
    token_classifier="classifier",
)
