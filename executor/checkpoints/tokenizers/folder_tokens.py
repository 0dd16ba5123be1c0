"""The special and added tokens that the files of a model's folder name, and a tokenizer completed with them.

They stand in up to four files: tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json.
What holds is as in transformers 5.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.checkpoint import read_optional_json
from headrace.executor.checkpoints.tokenizers.panics import try_out
from headrace.executor.checkpoints.tokenizers.tokenizer_keys import (
    A_TOKEN,
    ROLES,
    TOKEN_FLAGS,
    TOKEN_TYPES,
    check_types,
    is_role,
)
from headrace.ipc.failure import ModelError

logger = logging.getLogger(__name__)

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Keys with special tokens that have no role: a list of them, or an object that names them."""
MOST_UNNAMED = 100_000
"""The most ids without a token that are filled before a listed one."""
_S, _TEXT, _SEP = ("<s>", "</s>"), ("<|endoftext|>", "<|endoftext|>"), ("[CLS]", "[SEP]")
ENDS_OF_CLASSES: Mapping[str, tuple[str | None, str]] = MappingProxyType(
    dict.fromkeys(("Llama", "CodeLlama", "XLMRoberta", "Camembert", "Roberta", "MBart", "Barthez", "XLNet"), _S)
    | dict.fromkeys(("BigBird", "MPNet", "Funnel", "Nougat", "Pegasus"), _S)
    | dict.fromkeys(("GPT2", "GPTNeoX", "CodeGen", "Whisper"), _TEXT)
    | dict.fromkeys(("Albert", "Deberta", "DebertaV2"), _SEP)
    | dict.fromkeys(("T5", "Reformer"), (None, "</s>"))
    | dict.fromkeys(("Qwen2", "Qwen3_5"), (None, "<|endoftext|>"))
    | {"Gemma": ("<bos>", "<eos>"), "Cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")}
)
"""bos_token and eos_token of transformers' classes of tokenizers where the files do not name them."""


@dataclass(frozen=True)
class Token:
    """A token to add, unless the tokenizer has it."""

    text: str
    special: bool
    flags: Mapping[str, bool]
    token_id: int | None = None
    """Where it must stand; None: after the others."""
    flags_hold: bool = False
    """Whether its flags come before those that tokenizer.json has for it."""


@dataclass(frozen=True)
class FolderTokens:
    folder: Path
    roles: Mapping[str, str]
    """Special tokens by role (bos_token, ...), as chat templates refer to them."""
    special: tuple[Token, ...]
    """All special tokens, with a role or without."""
    listed: tuple[Token, ...]
    """Tokens listed with their ids, in order of these."""
    of_class: Mapping[str, str]
    """Special tokens by role that no file names and that the tokenizer's class has, where the vocabulary has them."""


def folder_tokens(folder: Path, config: Mapping[str, Any]) -> FolderTokens:
    """config: content of tokenizer_config.json. Raises ModelError, naming file and key, for what is no token.

    special_tokens_map.json comes before the config, unless this lists its added tokens; then added_tokens.json does not
    count.
    """
    older = {name: value for name, value in read_optional_json(folder / MAP).items() if value is not None}
    check_types(folder / MAP, older)
    given = {name: value for name, value in config.items() if value is not None}
    is_listed = config.get("added_tokens_decoder") is not None
    merged = older | given if is_listed else given | older
    roles: dict[str, Token] = {}
    for name, value in merged.items():
        if is_role(name, value):
            roles[name] = _token(folder, name, value)
    extra: list[Token] = []
    for source in (given, older):
        for key in EXTRA:
            named, unnamed = _extra(folder, key, source.get(key))
            roles |= named
            extra += unnamed
    roles = dict(sorted(roles.items(), key=lambda item: ROLES.index(item[0]) if item[0] in ROLES else len(ROLES)))
    special: dict[str, Token] = {}
    for token in (*roles.values(), *extra):
        special.setdefault(token.text, token)
    if is_listed:
        listed = _decoder(folder, config["added_tokens_decoder"])
    else:
        listed = _added(folder, special)
    listed = sorted(listed, key=lambda token: token.token_id or 0)
    texts = {name: token.text for name, token in roles.items()}
    ends = ENDS_OF_CLASSES.get(str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer"), ())
    of_class = {
        role: text
        for role, text in zip(("bos_token", "eos_token"), ends, strict=False)
        if text is not None and role not in texts and role not in config
    }
    return FolderTokens(folder, texts, tuple(special.values()), tuple(listed), of_class)


def completed(data: bytes, tokens: FolderTokens) -> bytes:
    """A tokenizer.json with the folder's tokens that it lacks, and with the flags that the config lists for those that
    it has. A token with a role is special; one of `EXTRA` is what tokenizer.json says.

    Raises ModelError for what the files say, and what the library raises for a tokenizer that is not sound.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    missing = {token.text: token for token in (*tokens.special, *tokens.listed) if token.text not in known}
    for token in sorted(missing.values(), key=lambda token: (token.token_id is None, token.token_id)):
        _add(tokenizer, token, tokens.folder)
    changed = _with_other_flags(known, tokens)
    tokenizer.add_tokens(changed)
    for token in tokens.listed:
        if (found := tokenizer.token_to_id(token.text)) != token.token_id:
            logger.warning(
                "%s: its files give the token %r the id %s, and its tokenizer has it at %s, which holds",
                tokens.folder, token.text, token.token_id, found,
            )  # fmt: skip
    try_out(tokenizer)
    return tokenizer.to_str().encode() if missing or changed else data


def _with_other_flags(known: Mapping[str, Any], tokens: FolderTokens) -> list[Any]:
    """The added tokens of a tokenizer that the folder's other files give other flags. known: by their texts."""
    from tokenizers import AddedToken

    listed = {token.text: token for token in tokens.listed if token.flags_hold}
    with_role = set(tokens.roles.values())
    changed = []
    for text, token in known.items():
        other = listed.get(text)
        special = text in with_role or (token.special if other is None else other.special)
        flags = {name: getattr(token, name) for name in TOKEN_FLAGS} if other is None else other.flags
        wanted = AddedToken(text, special=special, **flags)
        if repr(wanted) != repr(token):
            changed.append(wanted)
    return changed


def _add(tokenizer: Any, token: Token, folder: Path) -> None:
    from tokenizers import AddedToken

    size = tokenizer.get_vocab_size()
    if token.token_id is not None and tokenizer.token_to_id(token.text) is None and token.token_id > size:
        if token.token_id > size + MOST_UNNAMED:
            raise ModelError(f"{folder}: the token {token.text!r} is listed at {token.token_id}, of {size} tokens")
        fill = [f"<|reserved_token_{index}|>" for index in range(size, token.token_id)]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in fill])
    tokenizer.add_tokens([AddedToken(token.text, special=token.special, **token.flags)])


def _token(folder: Path, key: str, value: Any, **more: Any) -> Token:
    """A token as a text, or as an object with its flags. Raises ModelError."""
    if isinstance(value, str):
        return Token(value, **{"special": True, "flags": {}, **more})
    if not isinstance(value, Mapping) or value.get("content") is None:
        raise ModelError(f"{folder}: {key} is {value!r:.80}; {A_TOKEN} is expected")
    check_types(f"{folder}: {key}", value, TOKEN_TYPES)
    given = {name: value[name] for name in TOKEN_TYPES if value.get(name) is not None}
    flags = {name: given[name] for name in TOKEN_FLAGS if name in given}
    return Token(given["content"], **{"special": given.get("special", True), "flags": flags, **more})


def _extra(folder: Path, key: str, value: Any) -> tuple[dict[str, Token], list[Token]]:
    """(special tokens by role, those without one)."""
    if value is None:
        return {}, []
    if isinstance(value, Mapping):
        return {str(name): _token(folder, f"{key}: {name}", each) for name, each in value.items()}, []
    if not isinstance(value, list):
        raise ModelError(f"{folder}: {key} is {value!r:.80}; a list of tokens or an object is expected")
    return {}, [_token(folder, key, each) for each in value]


def _decoder(folder: Path, listed: Any) -> list[Token]:
    """The tokens of added_tokens_decoder, an object of ids and tokens."""
    if not isinstance(listed, Mapping):
        raise ModelError(f"{folder / CONFIG}: added_tokens_decoder is {listed!r:.80}; an object is expected")
    found = []
    for key, value in listed.items():
        if not key.isdecimal() or not isinstance(value, Mapping):
            raise ModelError(
                f"{folder / CONFIG}: added_tokens_decoder has {key!r}: {value!r:.80}; it maps ids to objects"
            )
        # Without the flag it is not special, unlike a token with a role.
        given = {"special": False, **{name: each for name, each in value.items() if each is not None}}
        found.append(_token(folder, f"added_tokens_decoder: {key}", given, token_id=int(key), flags_hold=True))
    return found


def _added(folder: Path, special: Container[str]) -> list[Token]:
    """The tokens of added_tokens.json, an object of texts and ids."""
    content = read_optional_json(folder / ADDED)
    for text, token_id in content.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ModelError(f"{folder / ADDED} has {text!r}: {token_id!r:.80}; a token id is expected")
    return [
        Token(text, text in special, {"normalized": text not in special}, token_id)
        for text, token_id in content.items()
    ]
