"""Mistral's own tokenizers: `tekken.json`, a vocabulary in tiktoken's way behind the special tokens, and the chat
template that the library `mistral-common` makes of it.

Published with the models of https://huggingface.co/mistralai; what the fields mean: mistral_common's Tekkenizer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.byte_level import byte_level_tokenizer
from headrace.executor.checkpoints.converted_tokenizers import cached_bundle
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import TokenizerBundle

FILE, LIBRARY, EXTRA = "tekken.json", "mistral_common", "mistral"
BOS, ROLES = "<s>", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
UNNAMED = "<SPECIAL_{}>"
FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that list none, which are of versions up to v7."""


def check_installed() -> None:
    """Raises OptionError where the library that makes chat templates is not here."""
    if util.find_spec(LIBRARY) is None:
        raise OptionError(
            f"tokenizer_mode=mistral needs {LIBRARY}, which is not installed: "
            f"in Headrace's clone, pip install '.[{EXTRA}]'"
        )


def tekken_bundle(
    folder: Path, content: Mapping[str, Any], templates: Mapping[str, str], made: bool
) -> TokenizerBundle:
    """content: of the file. templates: those of the folder; made: they give way to the library's.

    Raises ModelError where file or template is not sound.
    """
    path = folder / FILE
    by = f"{LIBRARY}-{metadata.version(LIBRARY)}" if made else ""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    names = ",".join(f"{name}={hashlib.sha256(text.encode()).hexdigest()}" for name, text in sorted(templates.items()))

    def convert() -> TokenizerBundle:
        tokenizer = _tokenizer(path, content)
        known = {name: token for name, token in ROLES.items() if tokenizer.token_to_id(token) is not None}
        text: str = tokenizer.to_str()
        chat = {"default": _template(path)} if made else dict(templates)
        return TokenizerBundle(tokenizer_json=text.encode(), chat_templates=chat, special_tokens=known)

    return cached_bundle(f"tekken {digest} {by} {names} tokenizers-{metadata.version('tokenizers')}", convert)


def _tokenizer(path: Path, content: Mapping[str, Any]) -> Any:
    from tokenizers import processors

    ranks, special, pattern = _read(path, content)
    tokenizer = byte_level_tokenizer(path, ranks, pattern, first=special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, special.index(BOS))]
    )
    return tokenizer


def _read(path: Path, content: Mapping[str, Any]) -> tuple[dict[bytes, int], list[str], str]:
    """Ranks by token, the special tokens in order of their ids, and the expression that cuts text."""
    try:
        config = content["config"]
        pattern, num_special = str(config["pattern"]), int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - num_special
        listed = content.get("special_tokens")
        named = dict(enumerate(FIRST_SPECIAL))
        if listed is not None:
            named = {int(each["rank"]): str(each["token_str"]) for each in listed}
        entries = content["vocab"][:size]
        ranks = {base64.b64decode(each["token_bytes"], validate=True): int(each["rank"]) for each in entries}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is no tokenizer of Mistral's: {type(error).__name__}: {error}") from None
    special = [named.get(index, UNNAMED.format(index)) for index in range(num_special)]
    if sorted(ranks.values()) != list(range(size)) or max(named, default=0) >= num_special:
        raise ModelError(
            f"{path} has {len(ranks)} tokens and {len(named)} special ones; its config says {size} and {num_special}"
        )
    if BOS not in special:
        raise ModelError(f"{path} has no special token {BOS}")
    return ranks, special, pattern


def _template(path: Path) -> str:
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

        template: str = convert_tokenizer_to_chat_template(path)
    except Exception as error:  # the library's own, ValueError, and what an older one lacks
        version = metadata.version(LIBRARY)
        raise ModelError(f"{LIBRARY} {version} makes no chat template of {path}: {error}") from error
    return template
