"""Jina BERT (Günther et al. 2023, jina-embeddings-v2): BERT with ALiBi to both sides and a gated FFN."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import NamedActivation, alibi_slopes, integer, one_of
from headrace.executor.models.families._encoders import check_positions, classifier, encoder, heads_of, pooler
from headrace.executor.models.families.bert import NAMES as BERT

NAMES = replace(BERT, gate="mlp.gate", up="mlp.up", down="mlp.wo", mlp_norm="mlp.layernorm")
GATES: dict[str, NamedActivation] = {"geglu": "gelu", "reglu": "relu"}


def build(config: Config) -> ArchSpec:
    check_positions(config, "alibi")
    inner = integer(config, "intermediate_size")
    return encoder(
        config,
        names=NAMES,
        ffn=Dense(inner, GATES[one_of(config, "feed_forward_type", *GATES)], down_bias=True),
        attention={"alibi": alibi_slopes(integer(config, "num_attention_heads"))},
        default_positions=8192,
        default_types=2,
        fused=(Fused("mlp.gated_layers", ((NAMES.gate, inner), (NAMES.up, inner))),),
        classifier=classifier(config, pooler(config)),
    )


FAMILY = Family(
    heads_of("JinaBert"),
    build,
    ignored={
        "attn_implementation": "a kernel of the original code",
        "emb_pooler": "of the original code's own pooling; the folder's modules say how",
        "hidden_act": "of FFNs without a gate",
        "model_max_length": "of the tokenizer",
    },
)
