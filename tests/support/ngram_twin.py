"""LongCat-Flash-Lite's embeddings of n-grams by their definition, on a model of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

NEIGHBOURS, SPLITS, RATIO, END = 4, 2, 3, 52
"""END is among the tokens of the tests' prompts."""


def embed_ngrams(model: Any) -> None:
    config, generator = model.config, torch.Generator().manual_seed(0)
    count = (NEIGHBOURS - 1) * SPLITS
    width, rows = config.hidden_size // count, [RATIO * config.vocab_size + 2 * index + 1 for index in range(count)]
    own = model.model.ngram_embeddings = torch.nn.Module()
    own.embedders = torch.nn.ModuleList(torch.nn.Embedding(each, width) for each in rows)
    own.post_projs = torch.nn.ModuleList(torch.nn.Linear(width, config.hidden_size, bias=False) for _ in rows)
    for parameter in own.parameters():
        parameter.data.normal_(0, 0.7, generator=generator)
    model.model.embed_tokens.register_forward_hook(partial(_with_ngrams, own, config.vocab_size))


def _with_ngrams(own: Any, vocab_size: int, _: Any, given: tuple[Tensor], embedded: Tensor) -> Tensor:
    ids = given[0][0].tolist()
    found = embedded.clone()
    for index, (table, projection) in enumerate(zip(own.embedders, own.post_projs, strict=True)):
        length = index // SPLITS + 2
        places = [_hash(ids[: at + 1], length, vocab_size) % table.num_embeddings for at in range(len(ids))]
        found[0] += projection(table(torch.tensor(places)))
    return found / (1 + len(own.embedders))


def _hash(ids: list[int], length: int, vocab_size: int) -> int:
    """Of the n-gram of `length` tokens with which ids end: a number whose digits are the tokens', the last the lowest.
    It begins after an end token, unless that is the last."""
    found = ids[-1]
    for back in range(1, min(length, len(ids))):
        if ids[-1 - back] == END:
            break
        found += ids[-1 - back] * vocab_size**back
    return found
