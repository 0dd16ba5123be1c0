"""A model's tokenizer as llguidance asks for it: the bytes of every token, and the division of a text into tokens.

The library's own reader takes every added token of the form <...> for one that is no text. Families write calls with
added tokens that are text (`special: false`: <tool_call> of Qwen, <think>, <｜tool▁sep｜> of DeepSeek), so a form that
holds such a text would exclude the token, which the tokenizer writes for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import tokenizers

_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
"""SentencePiece's spelling of single bytes, for characters that its vocabulary lacks."""

_NO_TOKEN = 0xFFFFFFFF
"""llguidance's id for a token that there is not. Without an id it would add a token, and make wider masks."""


class TokenBytes:
    """What llguidance calls a tokenizer wrapper; it reads these attributes and calls the object."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError if the kind of tokenizer is unknown. Takes about half a second for a large vocabulary."""
        parts = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
        small = ("normalizer", "pre_tokenizer", "decoder")
        named = {name: msgspec.json.decode(parts.get(name, b"null")) for name in small}
        self._tokenizer = tokenizers.Tokenizer.from_str(
            # Truncation and padding apply to whole prompts, and so does a space before the first word.
            msgspec.json.encode(
                {
                    **parts,
                    "truncation": None,
                    "padding": None,
                    "normalizer": _without_prefix(named["normalizer"]),
                    "pre_tokenizer": _without_prefix(named["pre_tokenizer"]),
                }
            ).decode()
        )
        self._tokenizer.encode_special_tokens = True  # their texts are letters, as the grammar means them
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special} | set(eos_token_ids)
        self.special_token_ids = sorted(each for each in special if each < vocab_size)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else _NO_TOKEN
        self.tokens = _bytes_of(self._tokenizer, named["decoder"], vocab_size)
        for token_id, token in added.items():
            if token_id < vocab_size:
                self.tokens[token_id] = token.content.encode()

    def __call__(self, text: str) -> list[int]:
        """The text's tokens, among them added ones that are text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _bytes_of(tokenizer: Any, decoder: Any, vocab_size: int) -> list[bytes]:
    """The bytes of the vocabulary's tokens by id; those of ids without a token are empty."""
    found, spaces = [b""] * vocab_size, list[str]()
    kinds = {each.get("type") for each in _flat(decoder)}
    for each in _flat(decoder):
        if each.get("type") == "Metaspace":
            spaces.append(each["replacement"])
        elif each.get("type") == "Replace" and each.get("content") == " ":
            spaces += filter(None, [each["pattern"].get("String")])
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(f"the bytes of tokens are unknown where the decoder is {decoder}")
    letters, byte_tokens = _byte_alphabet(), _BYTE_TOKENS if "ByteFallback" in kinds else {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id >= vocab_size:
            continue
        if "ByteLevel" in kinds:
            try:
                found[token_id] = token.translate(letters).encode("latin-1")
            except UnicodeEncodeError:
                found[token_id] = token.encode()  # spelt as text
        elif (byte := byte_tokens.get(token)) is not None:
            found[token_id] = byte
        else:
            for space in spaces:
                token = token.replace(space, " ")
            found[token_id] = token.encode()
    return found


def _byte_alphabet() -> dict[int, int]:
    """For `str.translate`: from each character of the byte-level alphabet to the character whose code is its byte
    (GPT-2; Radford et al. 2019, section 2.2). Printable bytes stand for themselves, others for those from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    # A space, or another character that is not in the alphabet, must not be taken for a byte.
    return dict.fromkeys(others, 256) | {256 + index: byte for index, byte in enumerate(others)}


def _flat(part: Any) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, which may hold sequences."""
    if not isinstance(part, dict):
        return
    inner = [part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part]
    if not inner:
        yield part
    for each in inner[0] if inner else ():
        yield from _flat(each)


def _without_prefix(part: Any) -> Any:
    """A normaliser or pre-tokenizer that adds no space before the first word."""
    if not isinstance(part, dict):
        return part
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return {**part, name: [_without_prefix(each) for each in part[name] if each.get("type") != "Prepend"]}
    if part.get("type") == "Prepend":
        return None
    if part.get("type") == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part.get("type") == "ByteLevel" else part
