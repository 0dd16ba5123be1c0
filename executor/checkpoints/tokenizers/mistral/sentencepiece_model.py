"""Mistral's tokenizers before tekken: SentencePiece models, tokenizer.model.v1 to v7 (tokenizer.model is one of v1).

Control tokens ([INST] and the like) are pieces of the model. A space is put before a text, as SentencePiece does
("add_dummy_prefix"); in a conversation, the chat template puts spaces before its parts.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.tokenizers import sentencepiece_tokenizers
from headrace.executor.checkpoints.tokenizers.sentencepiece_files import BPE, parse
from headrace.executor.checkpoints.tokenizers.sentencepiece_tokenizers import UNKNOWN, Pieces
from headrace.ipc.failure import ModelError


def sentencepiece_tokenizer(path: Path) -> Any:
    """Converts to a tokenizer of the `tokenizers` library. Raises ModelError, naming the file, if it is not valid."""
    pieces = _pieces(path)
    return sentencepiece_tokenizers.sentencepiece_tokenizer(
        path,
        Pieces(
            texts=[piece.piece for piece in pieces],
            scores=[piece.score for piece in pieces],
            types=[piece.type for piece in pieces],
            unknown_id=next((index for index, piece in enumerate(pieces) if piece.type == UNKNOWN), None),
            prefix="first",
        ),
    )


def _pieces(path: Path) -> list[Any]:
    """The pieces in order of their ids. Raises ModelError for a model that processes text otherwise than Mistral's."""
    model = parse(path)
    if model is None:
        raise ModelError(f"{path} is no SentencePiece model")
    trained, normal = model.trainer_spec, model.normalizer_spec
    facts = {
        "is no BPE": trained.model_type != BPE,
        "spells no bytes": not trained.byte_fallback,
        "changes characters": bool(normal.precompiled_charsmap),
        "puts no space before a text": not normal.add_dummy_prefix,
        "takes spaces out": normal.remove_extra_whitespaces,
    }
    if others := [fact for fact, is_so in facts.items() if is_so]:
        raise ModelError(f"{path} is no tokenizer of Mistral's: it {' and '.join(others)}")
    return list(model.pieces)
