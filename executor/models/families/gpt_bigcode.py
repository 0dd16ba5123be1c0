"""GPT BigCode (SantaCoder, StarCoder 1): GPT-2's shape with one key/value head; matrices are not stored transposed."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.families import Config, Family, gpt2
from headrace.executor.models.families._config import (
    Positions,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    plain,
)
from headrace.executor.models.families.gpt2 import COMMON_NAMES

NAMES = replace(gpt2.NAMES, output="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj")


def build(config: Config) -> ArchSpec:
    config = config.renamed(**COMMON_NAMES)
    hidden, num_heads, head_dim = (
        integer(config, "hidden_size"),
        integer(config, "num_attention_heads"),
        head_dim_of(config),
    )
    is_shared = flag(config, "multi_query", True)
    queries = num_heads * head_dim if is_shared else head_dim
    parts = ((NAMES.query, queries), (NAMES.key, head_dim), (NAMES.value, head_dim))
    return llama_like(
        config | {"num_key_value_heads": 1 if is_shared else num_heads},
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={"bias": True, "output_bias": True},
        ffn=plain(config, integer(config, "n_inner", 4 * hidden), "activation_function", "gelu_pytorch_tanh"),
        tied_head=True,
        norm=layer_norm(config, "layer_norm_epsilon"),
        learned_position_offset=0,
        fused=(Fused("attn.c_attn", parts, 1 if is_shared else num_heads),),
        names=NAMES,
    )


FAMILY = Family(("GPTBigCodeForCausalLM",), build, token_classifier="classifier")
