"""MPNet (Song et al. 2020): BERT with a bias by distance, which all layers share, and RoBERTa's positions."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import integer
from headrace.executor.models.families._encoders import (
    IGNORABLE,
    LM_HEAD,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)

FIRST_POSITION = 2
"""The padding token's id is 1, whatever the config says of it."""
FARTHEST = 128
NAMES = WeightNames(
    prefixes=("mpnet.", ""),
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    distance_bias="attention.attn.relative_attention_bias",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
    ignorable=IGNORABLE,
)


def build(config: Config) -> ArchSpec:
    reach = integer(config, "max_position_embeddings", 512)
    return encoder(
        config,
        names=NAMES,
        learned_position_offset=FIRST_POSITION,
        attention={"distance_bias": (integer(config, "relative_attention_num_buckets", 32), FARTHEST, reach)},
        shared=((NAMES.distance_bias, "encoder.relative_attention_bias"),),
        classifier=classifier(config, pooler(config, "classifier.dense"), name="classifier.out_proj"),
        vocabulary_layers=vocabulary_layers(config, *LM_HEAD),
    )


FAMILY = Family(heads_of("MPNet"), build)
