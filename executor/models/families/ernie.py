"""ERNIE (Sun et al. 2021): BERT, to whose embeddings the type of a task may be added, always the first here."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag
from headrace.executor.models.families._encoders import (
    check_positions,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)
from headrace.executor.models.families.bert import NAMES as BERT
from headrace.executor.models.families.bert import VOCABULARY

NAMES = replace(BERT, prefixes=("ernie.", ""))


def build(config: Config) -> ArchSpec:
    check_positions(config)
    return encoder(
        config,
        names=NAMES,
        learned_position_offset=0,
        default_types=2,
        task_types="embeddings.task_type_embeddings" if flag(config, "use_task_id", False) else "",
        classifier=classifier(config, pooler(config)),
        vocabulary_layers=vocabulary_layers(config, *VOCABULARY),
    )


FAMILY = Family(
    (*heads_of("Ernie"), "ErnieForPreTraining"), build, ignored={"task_type_vocab_size": "of the table of tasks' types"}
)
