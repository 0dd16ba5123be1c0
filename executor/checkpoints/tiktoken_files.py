"""Tokenizers whose vocabulary is a file of tiktoken's: a line for each token, its bytes in base64 and its rank.

The rest stands in code of the checkpoint (how text is cut, which tokens are special), which is not run: `KINDS` has it
of each class of tokenizers that is known. Others are left to transformers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.gguf.tokenizer import SPLITS, Split
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class TiktokenKind:
    file: str
    split: Split
    special: tuple[str, ...] = ()
    """Tokens that follow the vocabulary, where tokenizer_config.json does not list them."""
    unnamed: str = "<|reserved_token_{}|>"
    """What an id is called that lies between those listed."""


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
KINDS: Mapping[str, TiktokenKind] = MappingProxyType(
    {
        "TikTokenTokenizer": TiktokenKind("tiktoken.model", SPLITS["kimi-k2"]),
        "QWenTokenizer": TiktokenKind("qwen.tiktoken", SPLITS["qwen2"], _QWEN_SPECIAL),
    }
)
"""By the config's tokenizer_class."""


def tiktoken_kind(folder: Path, config: Mapping[str, Any]) -> TiktokenKind | None:
    """config: of tokenizer_config.json. None where the folder has no such tokenizer."""
    kind = KINDS.get(str(config.get("tokenizer_class")))
    return kind if kind is not None and (folder / kind.file).is_file() else None


def tiktoken_json(folder: Path, kind: TiktokenKind, config: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of the same tokenizer. Raises ModelError, naming the file, where it is not sound."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path = folder / kind.file
    ranks = _ranks(path)
    letters = _letters()
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(texts[left], texts[right]) for left, right in _merges(ranks)]
    try:
        # A piece that is a token is taken at once, as tiktoken does it.
        model = models.BPE({texts[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"the tokenizer in {path} is not sound: {error}") from error
    tokenizer = Tokenizer(model)
    assert kind.split.regex is not None
    steps: list[Any] = [pre_tokenizers.Split(Regex(kind.split.regex), behavior="isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    names = _special(path, kind, config, len(ranks))
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    if tokenizer.get_vocab_size() != len(ranks) + len(names):
        raise ModelError(f"{path}: a special token of tokenizer_config.json stands in it too, or twice")
    text: str = tokenizer.to_str()
    return text.encode()


def _ranks(path: Path) -> dict[bytes, int]:
    """By token, from 0 without a gap. Raises ModelError."""
    found: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                found[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is no file of tiktoken's (a token in base64 and a rank per line): {error}") from None
    if sorted(found.values()) != list(range(len(found))):
        raise ModelError(f"{path} has {len(found)} tokens, and their ranks are not 0 to {len(found) - 1}")
    if lacking := [byte for byte in range(256) if bytes((byte,)) not in found]:
        raise ModelError(f"{path} has no token for {len(lacking)} of the 256 bytes")
    return found


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to make a token of two, tokens of lower rank first: tiktoken joins what makes the lowest rank."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in parts if left in ranks and right in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _special(path: Path, kind: TiktokenKind, config: Mapping[str, Any], first: int) -> list[str]:
    """In order of their ids, of which the first is that of the first token."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping) or not listed:
        return list(kind.special)
    try:
        named = {int(key): str(entry["content"]) for key, entry in listed.items()}
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder is not understood") from None
    if min(named) < first:
        raise ModelError(f"{path} has {first} tokens, and tokenizer_config.json names {min(named)} a special one")
    return [named.get(index, kind.unnamed.format(index)) for index in range(first, max(named) + 1)]


def _letters() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's): itself where it is visible, else
    one of those from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    by_byte = dict(zip(visible, map(chr, visible), strict=True))
    by_byte |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [by_byte[byte] for byte in range(256)]
