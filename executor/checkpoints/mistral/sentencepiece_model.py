"""Mistral's tokenizers before tekken: SentencePiece models, tokenizer.model.v1 to v7 (tokenizer.model is one of v1).

Control tokens ([INST] and the like) are pieces of the model. A space is put before a text, as SentencePiece does
("add_dummy_prefix"); in a conversation, the chat template puts spaces before its parts.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.converted_tokenizers import WITHOUT, is_installed
from headrace.ipc.failure import ModelError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BPE = 2


def check_readable(path: Path) -> None:
    """Raises ModelError if a library that is needed to read SentencePiece models is not installed."""
    if needed := [name for name in ("sentencepiece", "google.protobuf") if not is_installed(name)]:
        packages = " ".join(name.removeprefix("google.") for name in needed)
        raise ModelError(
            f"reading {path.name} in {path.parent} needs {packages}, which is not installed: pip install {packages}",
            hint=WITHOUT,
        )


def sentencepiece_tokenizer(path: Path) -> Any:
    """Converts to a tokenizer of the `tokenizers` library. Raises ModelError, naming the file, if it is not valid."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = _pieces(path)
    vocabulary = {piece.piece: index for index, piece in enumerate(pieces)}
    unknown = next((piece.piece for piece in pieces if piece.type == UNKNOWN), None)
    try:
        tokenizer = Tokenizer(
            models.BPE(vocabulary, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"the tokenizer in {path} is not sound: {error}") from error
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # Two steps, since a single Metaspace adds no space before a text that already begins with one. The first finds no
    # spaces to replace, and adds one before a text unless a special token precedes it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [piece for piece in pieces if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(piece.piece, normalized=False, special=piece.type != USER_DEFINED) for piece in special]
    )
    if tokenizer.get_vocab_size() != len(pieces):
        raise ModelError(f"{path} has {len(pieces)} pieces, of which {tokenizer.get_vocab_size()} are different")
    return tokenizer


def _pieces(path: Path) -> list[Any]:
    """The pieces in order of their ids. Raises ModelError for a model that processes text otherwise than Mistral's."""
    check_readable(path)
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made as it is imported
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError, of whichever implementation is there
        raise ModelError(f"{path} is no SentencePiece model: {error}") from error
    trained, normal = model.trainer_spec, model.normalizer_spec
    facts = {
        "has no pieces": not model.pieces,
        "is no BPE": trained.model_type != BPE,
        "spells no bytes": not trained.byte_fallback,
        "changes characters": bool(normal.precompiled_charsmap),
        "puts no space before a text": not normal.add_dummy_prefix,
        "takes spaces out": normal.remove_extra_whitespaces,
    }
    if others := [fact for fact, is_so in facts.items() if is_so]:
        raise ModelError(f"{path} is no tokenizer of Mistral's: it {' and '.join(others)}")
    return list(model.pieces)


def _merges(pieces: list[Any]) -> list[tuple[str, str]]:
    """BPE merges: every pair of pieces that make a piece, pieces of higher score first, since SentencePiece first joins
    the pair whose result has the highest score."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    found = []
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(left, right) for left, right in cuts if left in scores and right in scores]
    return found
