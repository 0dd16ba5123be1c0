"""NVIDIA's embedding models and rerankers (Llama Nemotron Embed and Rerank): Llama, attending to both sides."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family, llama
from headrace.executor.models.families._config import integer, one_of
from headrace.executor.models.heads import Classifier, HeadLinear, num_labels

POOLINGS = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}
"""Of the config's `pooling`."""
_SCORES = "LlamaBidirectionalForSequenceClassification"


def build(config: Config) -> ArchSpec:
    pooling = one_of(config, "pooling", *POOLINGS)
    spec = llama.build(config | {"is_causal": False})
    spec = replace(spec, architecture=config["architectures"][0], has_head=False, tied_head=False)
    if spec.architecture != _SCORES:
        return spec
    labels = num_labels(config)
    layers = (HeadLinear("score", labels, integer(config, "hidden_size"), bias=False),)
    return replace(spec, classifier=Classifier(POOLINGS[pooling], layers, labels))


FAMILY = Family(("LlamaBidirectionalModel", _SCORES), build, ignored={"temperature": "of training"})
