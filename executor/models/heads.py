"""What a model computes of pooled hidden states: the layers of a classifier, as data. Imports no torch.

BertForSequenceClassification    CLS > pooler.dense, tanh > classifier
Qwen3ForSequenceClassification   LAST > score
RobertaForTokenClassification    ALL > classifier
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.ipc.failure import ModelError

HeadActivation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]

MOST_LABELS = 1 << 20
COLBERT = "HF_ColBERT"
"""The architecture that ColBERT's own code writes beside a BERT: one linear layer behind it makes tokens' vectors."""


@dataclass(frozen=True)
class HeadLinear:
    """activation(x W^T + b), and with a residual x or x R^T besides"""

    name: str
    """Without `.weight`; relative to the checkpoint or to the model's prefix, under whichever it is stored. Empty: its
    tensors are called weight and bias."""
    rows: int
    columns: int
    bias: bool = True
    activation: HeadActivation = "identity"
    folder: str = ""
    """Where its weights are, or their file; "": in the checkpoint."""
    residual: bool = False
    """What comes in is added behind the activation; through a matrix `residual` where it has another width."""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of its tensors."""
        stem = f"{self.name}." if self.name else ""
        yield f"{stem}weight", (self.rows, self.columns)
        if self.bias:
            yield f"{stem}bias", (self.rows,)
        if self.residual and self.rows != self.columns:
            yield "residual.weight", (self.rows, self.columns)


@dataclass(frozen=True)
class HeadNorm:
    """Layer norm."""

    name: str
    size: int
    eps: float
    bias: bool = True
    folder: str = ""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.size,)
        if self.bias:
            yield f"{self.name}.bias", (self.size,)


@dataclass(frozen=True)
class HeadUnitLength:
    """Scales a vector to length 1."""

    folder: str = ""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """None."""
        return iter(())


@dataclass(frozen=True)
class HeadTokens:
    """The logit of a token, less that of a second one if there are two: rows of the model's output matrix."""

    tokens: tuple[str | int, ...]
    """As the vocabulary spells them, or their ids."""
    matrices: tuple[str, ...]
    """Names of the matrix, without `.weight`: the first that the checkpoint has is read."""
    vocab_size: int
    columns: int
    folder: str = ""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """None of its own."""
        return iter(())


@dataclass(frozen=True)
class HeadVocabulary:
    """The logits of all tokens, as a masked language model has them."""

    matrices: tuple[str, ...]
    """As in `HeadTokens`; the last is the embedding, to which it may be tied."""
    biases: tuple[str, ...]
    """Whole names of its bias: the first that the checkpoint has is read; none: it has no bias."""
    vocab_size: int
    columns: int
    folder: str = ""

    @property
    def rows(self) -> int:
        return self.vocab_size

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """None of its own."""
        return iter(())


HeadLayer = HeadLinear | HeadNorm | HeadUnitLength | HeadTokens | HeadVocabulary


@dataclass(frozen=True)
class Classifier:
    tokens: str
    """Of which tokens' hidden states it is computed, under a name of `TOKEN_POOLINGS` (executor/pooling/pooler.py), or
    several: of ALL for each by itself."""
    layers: tuple[HeadLayer, ...]
    num_labels: int
    head_first: bool = False
    """The layers are computed of all tokens, and then pooled."""


def num_labels(config: Mapping[str, Any]) -> int:
    """A config's number of classes, as transformers counts them: by id2label, else num_labels, else two. Raises
    ModelError."""
    if isinstance(labels := config.get("id2label"), Mapping) and labels:
        return len(labels)
    found = config.get("num_labels")
    found = 2 if found is None else found
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MOST_LABELS:
        raise ModelError(f"the config's num_labels must be a whole number from 1 to {MOST_LABELS}, got {found!r:.80}")
    return found
