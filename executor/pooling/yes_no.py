"""Rerankers that answer yes or no: which folders are such, how they write a pair, and whose logits are scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.heads import Classifier, HeadTokens
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import PairFormat

QWEN3 = PairFormat(
    segments=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    cut=1,
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
GEMMA = PairFormat(
    segments=("<bos>", "A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
    cut=3,
    instruction=(
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    ),
)
MXBAI = PairFormat(
    segments=(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
        "{instruction}query: {query}",
        "\n",
        "document: {document}",
        "\n",
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    cut=3,
    instruction="",
    instructed="instruction: {instruction}\n",
)


@dataclass(frozen=True)
class YesNo:
    tokens: tuple[str | int, ...]
    """The token, or its id, whose logit is the score, and perhaps one whose logit is taken from it."""
    pair_format: PairFormat | None
    """None: texts are joined as the tokenizer joins pairs."""


KNOWN: Mapping[str, YesNo] = {
    "qwen3-reranker": YesNo(("yes", "no"), QWEN3),
    "bge-reranker-v2-gemma": YesNo(("Yes",), GEMMA),
    "mxbai-rerank-base-v2": YesNo(("1", "0"), MXBAI),
    "mxbai-rerank-large-v2": YesNo(("1", "0"), MXBAI),
}
"""By a part of the model's name, in lower case, where the config is that of a model that generates."""


def yes_no_of(names: tuple[str, ...], config: Mapping[str, Any]) -> YesNo | None:
    """What the config says under vLLM's keys, which hf_overrides may give: classifier_from_token (the tokens for no and
    yes, or the one for yes) and is_original_qwen3_reranker; else what is known by one of the model's names. Raises
    ModelError."""
    given = config.get("classifier_from_token")
    known = None
    if not _classifies(config):  # as a copy with a classifier, which has the name of the original one
        known = next((found for part, found in KNOWN.items() if any(part in name.lower() for name in names)), None)
    if given is None:
        return YesNo(("yes", "no"), QWEN3) if config.get("is_original_qwen3_reranker") else known
    if not (isinstance(given, list) and len(given) in (1, 2) and all(isinstance(each, str) for each in given)):
        raise ModelError(
            f"the config's classifier_from_token is {given!r:.100}; a list of the token for yes, or of those for no "
            "and yes is expected"
        )
    own = known.pair_format if known is not None else None
    return YesNo(tuple(reversed(given)), QWEN3 if config.get("is_original_qwen3_reranker") else own)


def _classifies(config: Mapping[str, Any]) -> bool:
    return any(each.endswith("ForSequenceClassification") for each in config.get("architectures") or ())


def classifier_of(found: YesNo, heads: tuple[str, ...], vocab_size: int, width: int) -> Classifier:
    """heads: names of the output matrix, without `.weight`, of which the first that is there is read."""
    return Classifier("LAST", (HeadTokens(found.tokens, heads, vocab_size, width),), 1)
