"""BERT (Devlin et al. 2019): learned positions, token types, norms behind the blocks."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._encoders import (
    IGNORABLE,
    check_positions,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)
from headrace.executor.models.heads import COLBERT

NAMES = WeightNames(
    prefixes=("bert.", "model.", ""),
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
    ignorable=IGNORABLE,
)


VOCABULARY = (
    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
    *("cls.predictions.bias", "cls.predictions.decoder.bias"),
)


def build(config: Config) -> ArchSpec:
    if config.get("model_type") == "xlm-roberta":  # a ColBERT: its architecture names no model
        from headrace.executor.models.families import roberta

        return roberta.build(config)
    check_positions(config)
    return encoder(
        config,
        names=NAMES,
        learned_position_offset=0,
        default_types=2,
        classifier=classifier(config, pooler(config)),
        vocabulary_layers=vocabulary_layers(config, *VOCABULARY),
    )


FAMILY = Family((*heads_of("Bert"), "BertForPreTraining", COLBERT, "BertSpladeSparseEmbeddingModel"), build)
