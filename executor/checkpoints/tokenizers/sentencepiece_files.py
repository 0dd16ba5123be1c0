"""Reads SentencePiece models: tokenizer.model, and the same under other names.

transformers converts them class by class, and most of its classes look at the vocabulary alone: a unigram model is then
merged as a BPE, and the model's normalisation and prefix are lost. What is converted here is compared with
SentencePiece itself, on about a hundred texts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.tokenizers.comparison_texts import TEXTS
from headrace.executor.checkpoints.tokenizers.converted_tokenizers import WITHOUT, is_installed
from headrace.executor.checkpoints.tokenizers.sentencepiece_tokenizers import (
    UNKNOWN,
    USER_DEFINED,
    Pieces,
    Prefix,
    sentencepiece_tokenizer,
)
from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import read_file

logger = logging.getLogger(__name__)

UNIGRAM, BPE = 1, 2
KINDS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "character"}
LLAMA_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "InternLM2Tokenizer", "BaichuanTokenizer")
"""Classes that put a space before the start of a text alone, and not behind special tokens too, unless their `legacy`
is true."""
OWN_IDS = frozenset(
    (
        *("Albert", "Barthez", "Bartpho", "BigBird", "Camembert", "Cpm", "DebertaV2", "ErnieM", "FNet", "M2M100"),
        *("MBart", "MBart50", "MLuke", "Marian", "Nllb", "PLBart", "Pegasus", "Plbart", "Reformer", "RemBert"),
        *("SeamlessM4T", "Speech2Text", "T5", "Udop", "XGLM", "XLMProphetNet", "XLMRoberta", "XLNet"),
    )
)
"""transformers' classes (with Tokenizer at the end) in which a token's id is not that of its piece, or text is changed
before it is split."""
MOST_DIFFERENT = 2
"""How many of the texts may differ. The `tokenizers` library applies the map of characters to whole letters with their
marks, SentencePiece to characters: rare combinations differ. Unigram models may have two splits of equal score."""


@dataclass(frozen=True)
class SentencePieceModel:
    """A SentencePiece model's vocabulary, and its special tokens by role."""

    path: Path
    pieces: Pieces
    special_tokens: Mapping[str, str]

    def tokenizer(self, config: Mapping[str, Any], renamed: Mapping[int, str]) -> Any:
        """Converts to a tokenizer of the `tokenizers` library.

        config: content of tokenizer_config.json. renamed: texts of pieces that it replaces, by id. Raises ModelError if
        the result is not what SentencePiece gives, or the config asks for something that is not supported.
        """
        _check_same(self.path, self.pieces)
        pieces = replace(self.pieces, prefix=_prefix(self.pieces, config))
        texts = [renamed.get(index, text) for index, text in enumerate(pieces.texts)]
        return sentencepiece_tokenizer(self.path, replace(pieces, texts=texts))


def check_readable(path: Path) -> None:
    """Raises ModelError if a library that is needed to read SentencePiece models is not installed."""
    if needed := [name for name in ("sentencepiece", "google.protobuf") if not is_installed(name)]:
        packages = " ".join(name.removeprefix("google.") for name in needed)
        raise ModelError(
            f"reading {path.name} in {path.parent} needs {packages}, which is not installed: pip install {packages}",
            hint=WITHOUT,
        )


def parse(path: Path) -> Any:
    """The ModelProto in a file; None if it is no SentencePiece model. Raises ModelError if a library is missing."""
    check_readable(path)
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made as it is imported
    try:
        model.ParseFromString(read_file(path))
    except Exception:  # protobuf's DecodeError, of whichever implementation is there
        return None
    return model if model.pieces else None


def read_model(path: Path, model: Any) -> SentencePieceModel:
    """model: a result of `parse`. Raises ModelError, by name, for what the `tokenizers` library cannot do."""
    trained, normal = model.trainer_spec, model.normalizer_spec
    facts = {
        f"is a {KINDS.get(trained.model_type, trained.model_type)} model": trained.model_type not in (UNIGRAM, BPE),
        "puts the space behind a word (treat_whitespace_as_suffix)": trained.treat_whitespace_as_suffix,
        "leaves spaces as they are (escape_whitespaces)": not normal.escape_whitespaces,
        "changes characters of its output (denormalizer_spec)": bool(model.denormalizer_spec.precompiled_charsmap),
    }
    if others := [fact for fact, is_so in facts.items() if is_so]:
        raise ModelError(f"{path} cannot be converted: it {' and '.join(others)}", hint=WITHOUT)
    pieces = Pieces(
        texts=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        unknown_id=next((index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None),
        is_unigram=trained.model_type == UNIGRAM,
        byte_fallback=trained.byte_fallback,
        prefix="always" if normal.add_dummy_prefix else "never",
        removes_extra_spaces=normal.remove_extra_whitespaces,
        charsmap=normal.precompiled_charsmap,
    )
    ids = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    ids["pad_token"] = trained.pad_id
    special = {role: pieces.texts[index] for role, index in ids.items() if 0 <= index < len(pieces.texts)}
    return SentencePieceModel(path, pieces, special)


def reads_ids_of(config: Mapping[str, Any]) -> bool:
    """Whether a token's id is that of its piece, for the class that tokenizer_config.json names.

    So it is where there is none, and for most; not for a class whose code comes with the model, unless it is known.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name in LLAMA_CLASSES:
        return True
    return "auto_map" not in config and name.removesuffix("Tokenizer") not in OWN_IDS


def _prefix(pieces: Pieces, config: Mapping[str, Any]) -> Prefix:
    """Where a space is put before text, after tokenizer_config.json."""
    asked = config.get("add_prefix_space")
    if not (pieces.prefix != "never" if asked is None else asked):
        return "never"
    name, legacy = str(config.get("tokenizer_class")).removesuffix("Fast"), config.get("legacy")
    return "first" if not (name not in LLAMA_CLASSES if legacy is None else legacy) else "always"


def _check_same(path: Path, pieces: Pieces) -> None:
    """Raises ModelError where the conversion gives other ids than SentencePiece does, and logs single differences."""
    tokenizer, reference = sentencepiece_tokenizer(path, pieces), _processor(path, read_file(path))
    marks = [text for piece in pieces.of_types(USER_DEFINED)[:5] for text in (piece, f"a{piece}b", f"a {piece} b")]
    _compare(
        path, [*TEXTS, *marks], reference.encode, lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )


def check_pieces(model: Any, tokenizer: Any, folder: Path) -> None:
    """Compares a tokenizer that has ids of its own with the SentencePiece model it was made from, by its pieces.

    model: a result of `parse`. Raises ModelError as the conversion here does.
    """
    reference = _processor(folder, model.SerializeToString())
    _compare(
        folder,
        TEXTS,
        lambda text: [reference.id_to_piece(each) for each in reference.encode(text)],
        lambda text: [tokenizer.id_to_token(each) for each in tokenizer.encode(text, add_special_tokens=False).ids],
    )


def _processor(path: Path, model: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=model)
    except Exception as error:  # the library raises RuntimeError and others for what is not sound
        raise ModelError(f"the tokenizer in {path} is not sound: {error}") from error


def _compare(path: Path, texts: Sequence[str], wanted: Callable[[str], Any], found: Callable[[str], Any]) -> None:
    different = [text for text in texts if wanted(text) != found(text)]
    if len(different) > MOST_DIFFERENT:
        text = different[0]
        raise ModelError(
            f"the tokenizer in {path} cannot be converted: {text!r} gives {found(text)}, and SentencePiece gives "
            f"{wanted(text)}; so do {len(different) - 1} of {len(texts)} other texts differ",
            hint=WITHOUT,
        )
    for text in different:
        logger.warning("%s: %r gives %s; SentencePiece gives %s", path, text, found(text), wanted(text))
