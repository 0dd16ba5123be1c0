"""Builds `tokenizers` library tokenizers from vocabularies in tiktoken's form, which map bytes to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.ipc.failure import ModelError


def byte_level_tokenizer(
    path: Path, ranks: Mapping[bytes, int], pattern: str, *, first: Sequence[str] = (), last: Sequence[str] = ()
) -> Any:
    """ranks: 0, 1, ... without a gap. pattern: regular expression that splits a text into pieces. first, last: special
    tokens, whose ids come before and after those of the vocabulary.

    Raises ModelError, naming the file, if the vocabulary is not valid.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if lacking := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise ModelError(f"{path} has no token for {len(lacking)} of the 256 bytes")
    letters = _letters()
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(texts[left], texts[right]) for left, right in _merges(ranks)]
    vocabulary = {name: index for index, name in enumerate(first)}
    vocabulary |= {texts[token]: len(first) + rank for token, rank in ranks.items()}
    try:
        # ignore_merges: a piece that is itself a token is not merged step by step, as in tiktoken.
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"the tokenizer in {path} is not sound: {error}") from error
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in (*first, *last)])
    if tokenizer.get_vocab_size() != len(first) + len(ranks) + len(last):
        raise ModelError(f"{path}: a special token stands in the vocabulary too, or twice")
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """BPE merges: every pair of tokens that make a token, in order of that token's rank, since tiktoken first joins the
    pair whose result has the lowest rank."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in parts if left in ranks and right in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _letters() -> list[str]:
    """The character for each byte in byte-level tokenizers (GPT-2's): the byte's own character if it is visible, else
    one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    by_byte = dict(zip(visible, map(chr, visible), strict=True))
    by_byte |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [by_byte[byte] for byte in range(256)]
