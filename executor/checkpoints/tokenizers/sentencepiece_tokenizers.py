"""Builds `tokenizers` library tokenizers from SentencePiece vocabularies, of whatever file they come.

The result gives the ids that SentencePiece gives: its two models (BPE by scores and unigram), its normalisation (a
precompiled map of characters, spaces taken out) and the space that it puts before a text ("add_dummy_prefix").
Format and meaning of each field: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.executor.checkpoints.tokenizers.panics import try_out
from headrace.ipc.failure import ModelError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
Prefix = Literal["always", "first", "never"]
"""Where a space is put before text: where text begins, also behind a special token; at the start alone; nowhere."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A SentencePiece vocabulary in order of its ids, and how text is normalised."""

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown_id: int | None
    """The piece of characters that no piece spells."""
    is_unigram: bool = False
    byte_fallback: bool = True
    prefix: Prefix = "always"
    removes_extra_spaces: bool = False
    """Whether spaces at both ends are removed, and several between words become one."""
    charsmap: bytes = b""
    """SentencePiece's precompiled map of characters; empty: none are changed."""
    user_defined_first: bool = False
    """Whether user-defined pieces are looked for before text is normalised, and text begins anew behind them, as in
    llama.cpp; else in normalised text, as in SentencePiece."""

    strips_behind: Container[str] = ()
    """Special tokens behind which white space is removed."""

    def of_types(self, *types: int) -> list[str]:
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind in types]


def sentencepiece_tokenizer(path: Path, pieces: Pieces) -> Any:
    """A tokenizer of the `tokenizers` library, without a post-processor. Raises ModelError, naming the file, if the
    vocabulary is not sound."""
    from tokenizers import AddedToken, Tokenizer

    try:
        tokenizer = Tokenizer(_unigram(pieces) if pieces.is_unigram else _bpe(pieces))
        tokenizer.normalizer = _normalizer(pieces)
        try_out(tokenizer)
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"the tokenizer in {path} is not sound: {error}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pieces)
    tokenizer.decoder = _decoder(pieces.prefix)

    def added(text: str, special: bool) -> Any:
        return AddedToken(text, normalized=False, special=special, rstrip=text in pieces.strips_behind)

    tokenizer.add_tokens([added(text, True) for text in pieces.of_types(UNKNOWN, CONTROL)])
    if pieces.user_defined_first:
        tokenizer.add_tokens([added(text, False) for text in pieces.of_types(USER_DEFINED)])
    if tokenizer.get_vocab_size() != len(pieces.texts):
        raise ModelError(f"{path} has {len(pieces.texts)} pieces, of which {tokenizer.get_vocab_size()} are different")
    return tokenizer


def _bpe(pieces: Pieces) -> Any:
    from tokenizers import models

    vocabulary = {text: index for index, text in enumerate(pieces.texts)}
    return models.BPE(
        vocabulary,
        _merges(pieces),
        unk_token=None if pieces.unknown_id is None else pieces.texts[pieces.unknown_id],
        fuse_unk=True,
        byte_fallback=pieces.byte_fallback,
        ignore_merges=bool(_cut_out(pieces)),  # a user-defined piece that is cut out of the text is itself a token
    )


def _cut_out(pieces: Pieces) -> list[str]:
    """The user-defined pieces that are looked for in normalised text, longest first."""
    found = [] if pieces.user_defined_first else pieces.of_types(USER_DEFINED)
    return sorted(found, key=len, reverse=True)


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """BPE merges: every pair of pieces that make a piece, pieces of higher score first, since SentencePiece first joins
    the pair whose result has the highest score."""
    triples = zip(pieces.texts, pieces.scores, pieces.types, strict=True)
    scores = {text: score for text, score, kind in triples if kind in (NORMAL, UNUSED)}
    found = []
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(left, right) for left, right in cuts if left in scores and right in scores]
    return found


def _unigram(pieces: Pieces) -> Any:
    """Only normal and user-defined pieces take part in SentencePiece's choice. The library lets all take part: the
    others get the lowest score, since an unknown character costs 10 more than it. User-defined ones get the score with
    which they are always chosen."""
    from tokenizers import models

    normal = [score for score, kind in zip(pieces.scores, pieces.types, strict=True) if kind == NORMAL]
    lowest, highest = min(normal, default=0.0), max(normal, default=0.0)

    def score_of(text: str, score: float, kind: int) -> float:
        if kind == USER_DEFINED:
            return len(text) * highest - 0.1
        return float(score) if kind == NORMAL else lowest

    vocabulary = [
        (text, score_of(text, score, kind))
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True)
    ]
    return models.Unigram(vocabulary, unk_id=pieces.unknown_id, byte_fallback=pieces.byte_fallback)


def _normalizer(pieces: Pieces) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.removes_extra_spaces:
        # A space before text is the one that is put there, where one is: had it been removed, its text would not count
        # as the first.
        at_ends = r"\A +| +\z" if pieces.prefix == "never" else r"\A +\z| +\z"
        steps += [normalizers.Replace(Regex(at_ends), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(pieces: Pieces) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pieces.removes_extra_spaces:
        steps: list[Any] = [pre_tokenizers.Metaspace(SPACE, prepend_scheme=pieces.prefix, split=False)]
    else:
        steps = [
            pre_tokenizers.Metaspace(each["replacement"], prepend_scheme=each["prepend_scheme"], split=False)
            for each in prefix_steps(pieces.prefix)
        ]
    if (found := _cut_out(pieces)) and not pieces.is_unigram:
        pattern = "|".join(map(_literal, found))
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)


def prefix_steps(prefix: Prefix) -> list[dict[str, Any]]:
    """Pre-tokenizers, as tokenizer.json has them, that put a space before text in which spaces are replaced.

    Two, since a single Metaspace puts none before a text that begins with a space: the first finds no spaces to replace
    and puts the one before the text.
    """
    shared = {"type": "Metaspace", "split": False}
    return [
        {**shared, "replacement": " ", "prepend_scheme": prefix},
        {**shared, "replacement": SPACE, "prepend_scheme": "never"},
    ]


def _literal(text: str) -> str:
    """A regular expression (Oniguruma's) for a text."""
    return "".join(each if each.isalnum() or ord(each) > 127 else f"\\x{ord(each):02x}" for each in text)


def _decoder(prefix: Prefix) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps if prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)])
