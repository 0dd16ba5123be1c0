"""What the families of encoders share: attention to both sides, heads of classifiers, names that are not read."""

from __future__ import annotations

from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Config
from headrace.executor.models.families._config import flag, head_dim_of, integer, layer_norm, one_of, plain
from headrace.executor.models.heads import (
    Classifier,
    HeadActivation,
    HeadLayer,
    HeadLinear,
    HeadNorm,
    HeadVocabulary,
    num_labels,
)

IGNORABLE = (
    r"(^|\.)position_ids$",
    r"rotary_emb\.inv_freq$",
    r"(^|\.)pooler\.",
    r"^(cls|lm_head|vocab_transform|vocab_layer_norm|vocab_projector|qa_outputs|decoder|head)\.",
    r"^linear\.weight$",
)
"""Heads of pre-training, which make no vectors; and ColBERT's layer behind the model, which is read by itself."""


def heads_of(task: str) -> tuple[str, ...]:
    """The names that architectures of an encoder end with. task: the beginning, as `Bert`."""
    ends = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return tuple(f"{task}{end}" for end in ends)


def encoder(
    config: Config,
    *,
    names: WeightNames,
    ffn: Ffn | None = None,
    rope: RopeSpec | None = None,
    attention: dict[str, Any] | None = None,
    default_positions: int = 512,
    default_types: int = 0,
    **overrides: Any,
) -> ArchSpec:
    """BERT's architecture (Devlin et al. 2019): norms behind the blocks, biases everywhere, an FFN without a gate.

    attention: overrides fields of `Attention`. overrides: fields of ArchSpec.
    """
    head_dim, num_heads = head_dim_of(config), integer(config, "num_attention_heads")
    heads: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rope": rope,
        "bias": True,
        "output_bias": True,
        "causal": False,
    }
    mixer = Attention(**(heads | (attention or {})))
    ffn = ffn or plain(config, integer(config, "intermediate_size", 3072), "hidden_act", "gelu")
    flag(config, "tie_word_embeddings", True)  # of heads of pre-training, which are not read
    num_positions = integer(config, "max_position_embeddings", default_positions)
    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "hidden_size": integer(config, "hidden_size"),
        "vocab_size": integer(config, "vocab_size"),
        "max_positions": num_positions - (overrides.get("learned_position_offset") or 0),
        "layers": (LayerSpec(mixer, ffn),) * integer(config, "num_hidden_layers"),
        "norm": layer_norm(config, default=1e-12),
        "norm_placement": "post",
        "has_head": False,
        "embedding_norm": True,
        "token_types": integer(config, "type_vocab_size", default_types),
        "final_norm": False,
        "names": names,
    }
    return ArchSpec(**(fields | overrides))


def check_positions(config: Config, *kinds: str) -> None:
    one_of(config, "position_embedding_type", *(kinds or ("absolute",)))


def classifier(
    config: Config, *inner: HeadLayer, tokens: str = "CLS", name: str = "classifier", width: int | None = None
) -> Classifier | None:
    """The classifier of an architecture that has one: `inner` layers only for whole texts, then a linear layer `name`;
    None for other architectures."""
    named = config["architectures"][0]
    width, labels = width or integer(config, "hidden_size"), 0
    if named.endswith("ForSequenceClassification"):
        labels = num_labels(config)
        return Classifier(tokens, (*inner, HeadLinear(name, labels, width)), labels)
    if named.endswith("ForTokenClassification"):
        labels = num_labels(config)
        return Classifier("ALL", (HeadLinear("classifier", labels, width),), labels)
    return None


def vocabulary_layers(
    config: Config, dense: str, norm: str, matrix: str, *biases: str, function: HeadActivation = "gelu"
) -> tuple[HeadLayer, ...]:
    """A masked language model's layers: one with an activation, a norm, and the matrix, which may be tied to the
    embedding. biases: names of the matrix's bias; a tied matrix has the first, another one its own, the last."""
    width = integer(config, "hidden_size")
    if not flag(config, "tie_word_embeddings", True):
        biases = biases[::-1]
    return (
        HeadLinear(dense, width, width, activation=function),
        HeadNorm(norm, width, layer_norm(config, default=1e-12).eps),
        HeadVocabulary((matrix, "embeddings.word_embeddings"), biases, integer(config, "vocab_size"), width),
    )


LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", "lm_head.decoder.bias")
"""RoBERTa's names of `vocabulary_layers`."""


def pooler(config: Config, name: str = "pooler.dense", activation: HeadActivation = "tanh") -> HeadLinear:
    """BERT's layer between the first token's hidden state and the classifier."""
    width = integer(config, "hidden_size")
    return HeadLinear(name, width, width, activation=activation)
