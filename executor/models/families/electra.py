"""ELECTRA (Clark et al. 2020): BERT, as its discriminator has it, and a classifier with GELU."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import integer
from headrace.executor.models.families._encoders import (
    IGNORABLE,
    check_positions,
    classifier,
    encoder,
    heads_of,
    pooler,
)
from headrace.executor.models.families.bert import NAMES as BERT

NAMES = replace(
    BERT, prefixes=("electra.", ""), ignorable=(*IGNORABLE, r"^(discriminator|generator)_(predictions|lm_head)\.")
)


def build(config: Config) -> ArchSpec:
    check_positions(config)
    hidden, embedded = integer(config, "hidden_size", 256), integer(config, "embedding_size", 128)
    if embedded != hidden:
        raise NotNativeError(f"embeddings have {embedded} values and hidden states {hidden} (embedding_size)")
    return encoder(
        config,
        names=NAMES,
        learned_position_offset=0,
        default_types=2,
        classifier=classifier(config, pooler(config, "classifier.dense", "gelu"), name="classifier.out_proj"),
    )


FAMILY = Family((*heads_of("Electra"), "ElectraForPreTraining"), build)
