"""EuroBERT (Boizard et al. 2025): Llama's layers, whose tokens attend to both sides."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, flag, integer, llama_like, one_of
from headrace.executor.models.families._encoders import IGNORABLE, classifier, heads_of
from headrace.executor.models.heads import Classifier, HeadLinear

_POOLINGS = {"bos": "CLS", "mean": "MEAN", "late": "MEAN"}


def build(config: Config) -> ArchSpec:
    flag(config, "tie_word_embeddings", False)  # of heads of pre-training, which are not read
    return llama_like(
        config,
        attention={**biases(config, "attention_bias", False), "causal": False},
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=8192,
        names=WeightNames(ignorable=IGNORABLE),
        has_head=False,
        tied_head=False,
        classifier=_classifier(config),
    )


def _classifier(config: Config) -> Classifier | None:
    """That of whole texts; `late`: the mean of its tokens' logits."""
    pooling, width = one_of(config, "classifier_pooling", "late", "bos", "mean"), integer(config, "hidden_size")
    inner = HeadLinear("dense", width, width, activation="gelu")
    found = classifier(config, inner, tokens=_POOLINGS[pooling])
    if found is None or found.tokens == "ALL":
        return found
    return replace(found, head_first=pooling == "late")


FAMILY = Family(heads_of("EuroBert"), build, ignored={"mask_token_id": "of pre-training"})
