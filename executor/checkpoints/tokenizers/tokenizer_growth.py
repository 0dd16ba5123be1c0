"""Refuses tokenizers that make much text of little: a short prompt, or a short answer, would fill the memory.

A normalizer or a decoder may replace each character by a text of a megabyte, several in a row multiply each other, a
post-processor may repeat a prompt, and a token may stand for any text. Published tokenizers make at most a few
characters of one.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.ipc.failure import ModelError
from headrace.ipc.struct_types import threadsafe

MOST_GROWTH = 64
"""How many characters a normalizer, or a decoder, may make of one. 18 is the most that Unicode's own forms make."""
MOST_ADDED = 4096
"""How many tokens a post-processor may add."""
MOST_TEXT_BYTES = 1 << 14
"""How long a token's text may be."""
_LONG_TEXT = re.compile(rb'[^"\n]{%d,}' % (MOST_TEXT_BYTES + 1))


class _Described(msgspec.Struct):
    """The parts of a tokenizer's file that are looked at; its vocabulary is searched for long texts, undecoded."""

    normalizer: Any = None
    decoder: Any = None
    post_processor: Any = None


def check_growth(tokenizer_json: bytes, where: str) -> None:
    """Raises ModelError, which names the part. where: the file or folder that the tokenizer is from."""
    described = msgspec.json.decode(tokenizer_json, type=threadsafe(_Described))
    for name, whole in (("normalizer", described.normalizer), ("decoder", described.decoder)):
        growth = 1
        for part in _parts(whole):
            growth *= max(1, _growth(part))
            if growth > MOST_GROWTH:
                raise ModelError(
                    f"{where}: the tokenizer's {name} ({part.get('type')}) makes {growth} characters of one; at most "
                    f"{MOST_GROWTH} are taken"
                )
    for part in _parts(described.post_processor):
        _check_template(part, where)
    maps = {part.get("precompiled_charsmap") for part in _parts(described.normalizer)}
    for found in _LONG_TEXT.finditer(tokenizer_json) if _may_have_long_text(tokenizer_json) else ():
        if found.group().decode("utf-8", "replace") not in maps:
            raise ModelError(
                f"{where}: the tokenizer has a token of more than {MOST_TEXT_BYTES} bytes, as many as one may have"
            )


def _may_have_long_text(data: bytes) -> bool:
    """Whether _LONG_TEXT may be found, which takes long to say for certain: it would fill one of these parts."""
    size = MOST_TEXT_BYTES // 2
    return any(data.find(b'"', begin, begin + size) < 0 for begin in range(0, len(data) - size + 1, size))


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence, or of sequences in it; a part that is none, alone."""
    if not isinstance(part, dict):
        return
    held = next((part[name] for name in ("normalizers", "decoders", "processors") if name in part), None)
    if held is None:
        yield part
        return
    for each in held:
        yield from _parts(each)


def _growth(part: Mapping[str, Any]) -> int:
    """Into how many characters the part may turn one, apart from Unicode's own forms."""
    kind = part.get("type")
    if kind == "Replace":
        pattern, content = part.get("pattern") or {}, part.get("content") or ""
        literal = pattern.get("String")
        if literal:
            return -(-len(content) // len(literal))
        return len(content) + 1  # an expression may match nothing, beside each character
    if kind == "Prepend":
        return len(part.get("prepend") or "") + 1
    if kind == "Precompiled":
        return _longest_replacement(part.get("precompiled_charsmap") or "")
    texts = [part.get(name) for name in ("replacement", "prefix", "suffix", "pad_token", "word_delimiter_token")]
    # These replace or remove what they name.
    return max((len(text) for text in texts if isinstance(text, str)), default=1) if kind == "Metaspace" else 1


def _longest_replacement(charsmap: str) -> int:
    """SentencePiece's form: the size of a trie, the trie, and the replacements, each ended by a zero byte."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1
    size = int.from_bytes(data[:4], "little")
    replacements = data[4 + size :].split(b"\0")
    return max((len(each.decode("utf-8", "replace")) for each in replacements), default=1)


def _check_template(part: Mapping[str, Any], where: str) -> None:
    if part.get("type") != "TemplateProcessing":
        return
    special = part.get("special_tokens") or {}
    num_texts = num_added = 0
    for piece in part.get("single") or ():
        if "Sequence" in piece:
            num_texts += 1
        named = (piece.get("SpecialToken") or {}).get("id")
        num_added += len((special.get(named) or {}).get("ids") or ())
    if num_texts > 1 or num_added > MOST_ADDED:
        raise ModelError(
            f"{where}: the tokenizer's post_processor has a text {num_texts} times and adds {num_added} tokens; one "
            f"text and at most {MOST_ADDED} tokens are taken"
        )
