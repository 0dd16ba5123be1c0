"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT: BERT whose positions begin behind the padding token's id."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, jina_v3
from headrace.executor.models.families._config import integer
from headrace.executor.models.families._encoders import (
    LM_HEAD,
    check_positions,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)
from headrace.executor.models.families.bert import NAMES as BERT

NAMES = replace(BERT, prefixes=("roberta.", "model.", ""))


def build(config: Config) -> ArchSpec:
    if config.get("position_embedding_type") == "rotary" or "use_flash_attn" in config:
        return jina_v3.build(config)
    check_positions(config)
    return encoder(
        config,
        names=NAMES,
        learned_position_offset=integer(config, "pad_token_id", 1) + 1,
        default_types=1 if config["architectures"][0].startswith("XLM") else 2,
        classifier=classifier(config, pooler(config, "classifier.dense"), name="classifier.out_proj"),
        vocabulary_layers=vocabulary_layers(config, *LM_HEAD),
    )


OF_VLLM = ("BgeM3EmbeddingModel", "ColBERTJinaRobertaModel")
"""What vLLM has users name in hf_overrides."""
FAMILY = Family(
    (*heads_of("Roberta"), *heads_of("XLMRoberta"), *heads_of("Camembert"), *OF_VLLM),
    build,
    ignored=jina_v3.FAMILY.ignored,
)
