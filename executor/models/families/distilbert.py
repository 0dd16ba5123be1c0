"""DistilBERT (Sanh et al. 2019): BERT without token types and with other names."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer, layer_norm, plain
from headrace.executor.models.families._encoders import (
    IGNORABLE,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)

NAMES = WeightNames(
    prefixes=("distilbert.", ""),
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    ignorable=IGNORABLE,
)

VOCABULARY = ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")


def build(config: Config) -> ArchSpec:
    config = config.renamed(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    return encoder(
        config,
        names=NAMES,
        ffn=plain(config, integer(config, "hidden_dim", 3072), "activation", "gelu"),
        learned_position_offset=0,
        norm=layer_norm(config, default=1e-12),
        classifier=classifier(config, pooler(config, "pre_classifier", "relu")),
        vocabulary_layers=vocabulary_layers(config, *VOCABULARY),
    )


FAMILY = Family(
    heads_of("DistilBert"),
    build,
    ignored={
        "seq_classif_dropout": "training alone",
        "qa_dropout": "training alone",
        "sinusoidal_pos_embds": "the checkpoint stores the table of positions, whatever it was made from",
    },
)
