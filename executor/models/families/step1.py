"""Step 1 (Step-Audio's language model): Llama's shape without rotary positions, with ALiBi of the distance's root."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    alibi_slopes,
    biases,
    dense,
    flag,
    integer,
    llama_like,
)


def build(config: Config) -> ArchSpec:
    num_heads = integer(config, "num_attention_heads")
    own = config.renamed(num_key_value_heads="num_attention_groups", max_position_embeddings="max_seq_len")
    config = {"rms_norm_eps": 1e-5, "num_key_value_heads": 1} | own
    return llama_like(
        config,
        positions=[Positions(None)] * integer(config, "num_hidden_layers"),
        attention={
            "alibi": alibi_slopes(num_heads),
            "alibi_root": True,
            **biases(config, "attention_bias", False),
        },
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=4096,
        tied_head=True,
    )


FAMILY = Family(("Step1ForCausalLM",), build)
