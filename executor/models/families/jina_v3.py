"""Jina Embeddings 3 (Sturua et al. 2024): RoBERTa with rotary positions. Its tasks are LoRA adapters. The same code has
RoBERTa's own positions in Jina Reranker 2."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import head_dim_of, integer, one_of, rope
from headrace.executor.models.families._encoders import (
    IGNORABLE,
    LM_HEAD,
    classifier,
    encoder,
    heads_of,
    pooler,
    vocabulary_layers,
)

NAMES = WeightNames(
    prefixes=("roberta.", ""),
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layers="encoder.layers",
    query="mixer.query",
    key="mixer.key",
    value="mixer.value",
    output="mixer.out_proj",
    attention_norm="norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_norm="norm2",
    ignorable=IGNORABLE,
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(rope_theta="rotary_emb_base")
    is_rotary = one_of(config, "position_embedding_type", "rotary", "absolute") == "rotary"
    hidden = integer(config, "hidden_size")
    names = (NAMES.query, NAMES.key, NAMES.value)
    return encoder(
        config,
        names=NAMES,
        rope=rope(config, head_dim_of(config), 20_000.0) if is_rotary else None,
        learned_position_offset=None if is_rotary else integer(config, "pad_token_id", 1) + 1,
        default_positions=8194,
        default_types=1,
        fused=(Fused("mixer.Wqkv", tuple((name, hidden) for name in names)),),
        classifier=classifier(config, pooler(config, "classifier.dense"), name="classifier.out_proj"),
        vocabulary_layers=vocabulary_layers(config, *LM_HEAD),
    )


_OF_TASKS = ("lora_adaptations", "lora_alpha", "lora_rank", "default_task")
FAMILY = Family(
    heads_of("JinaEmbeddingsV3"),
    build,
    ignored={
        **dict.fromkeys(_OF_TASKS, "executor/checkpoints/merged_tasks.py reads it"),
        **dict.fromkeys(("lora_dropout_p", "lora_main_params_trainable", "load_trained_adapters"), "of training"),
        "task_instructions": "the folder's prompts have them",
        "emb_pooler": "of the original code's own pooling; the folder's modules say how",
        "truncate_dim": "requests say it (dimensions)",
        "use_reentrant": "of training",
    },
)
