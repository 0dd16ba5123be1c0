"""Tokenizers in tiktoken's file format: one line per token, with its bytes in base64 and its rank.

How text is split and which tokens are special is in the checkpoint's Python code, which is not run. `KINDS` has it for
each known tokenizer class; others are converted by transformers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.splits import SPLITS, Split
from headrace.executor.checkpoints.tokenizers.byte_level import byte_level_tokenizer
from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import is_there, read_file


@dataclass(frozen=True)
class TiktokenKind:
    file: str
    split: Split
    special: tuple[str, ...] = ()
    """Special tokens after the vocabulary, if tokenizer_config.json does not list them."""
    unnamed: str = "<|reserved_token_{}|>"
    """Name of an id between listed special tokens that is not listed itself."""


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
KINDS: Mapping[str, TiktokenKind] = MappingProxyType(
    {
        "TikTokenTokenizer": TiktokenKind("tiktoken.model", SPLITS["kimi-k2"]),
        "QWenTokenizer": TiktokenKind("qwen.tiktoken", SPLITS["qwen2"], _QWEN_SPECIAL),
    }
)
"""From the tokenizer_class in tokenizer_config.json."""


def tiktoken_kind(folder: Path, config: Mapping[str, Any]) -> TiktokenKind | None:
    """The folder's kind of tiktoken tokenizer; None if it has none. config: content of tokenizer_config.json."""
    kind = KINDS.get(str(config.get("tokenizer_class")))
    return kind if kind is not None and is_there(folder / kind.file) else None


def tiktoken_json(folder: Path, kind: TiktokenKind, config: Mapping[str, Any]) -> bytes:
    """The tokenizer converted to a tokenizer.json. Raises ModelError, naming the file, if it is not valid."""
    path = folder / kind.file
    ranks = _ranks(path)
    assert kind.split.regex is not None
    tokenizer = byte_level_tokenizer(path, ranks, kind.split.regex, last=_special(path, kind, config, len(ranks)))
    text: str = tokenizer.to_str()
    return text.encode()


def _ranks(path: Path) -> dict[bytes, int]:
    """The rank of each token: 0, 1, ... without a gap. Raises ModelError."""
    found: dict[bytes, int] = {}
    try:
        for line in read_file(path).splitlines():
            if line:
                token, rank = line.split()
                found[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is no file of tiktoken's (a token in base64 and a rank per line): {error}") from None
    if sorted(found.values()) != list(range(len(found))):
        raise ModelError(f"{path} has {len(found)} tokens, and their ranks are not 0 to {len(found) - 1}")
    return found


def _special(path: Path, kind: TiktokenKind, config: Mapping[str, Any], first: int) -> list[str]:
    """The special tokens in order of their ids, which begin at `first`. Raises ModelError."""
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
