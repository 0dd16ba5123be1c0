"""EXAONE 3 and 3.5: Llama's shape under names of its own."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, llama_like

NAMES = WeightNames(
    prefixes=("transformer.",),
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    query="attn.attention.q_proj",
    key="attn.attention.k_proj",
    value="attn.attention.v_proj",
    output="attn.attention.out_proj",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignorable=(*WeightNames.ignorable, r"\.rotary\.inv_freq$"),
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(
        num_hidden_layers="num_layers",
        rms_norm_eps="layer_norm_epsilon",
        hidden_act="activation_function",
    )
    return llama_like({"rms_norm_eps": 1e-5} | config, ffn=dense(config, "hidden_act", "silu"), names=NAMES)


FAMILY = Family(("ExaoneForCausalLM",), build)
