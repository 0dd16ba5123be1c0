"""Mistral's own tokenizers: tekken.json (`tekken.py`), the SentencePiece models before it (`sentencepiece_model.py`),
and the chat template that the library `mistral-common` generates for either."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.checkpoint import read_bytes
from headrace.executor.checkpoints.tokenizers.converted_tokenizers import cached_bundle, is_installed
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.process.regular_files import is_there

LIBRARY, EXTRA = "mistral_common", "mistral"
TEKKEN = "tekken.json"
BOS, ROLES = "<s>", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_SENTENCEPIECE = re.compile(r"tokenizer(?:\.mm)?\.model(?:\.v(\d+)(?:m\d+)?)?")


def check_installed() -> None:
    """Raises OptionError if the library that generates chat templates is not installed."""
    if not is_installed(LIBRARY):
        raise OptionError(f"tokenizer_mode=mistral needs {LIBRARY}, which is not installed: {how_to_install(EXTRA)}")


def tokenizer_file(folder: Path) -> Path | None:
    """tekken.json, else the SentencePiece model of the latest version; None if the folder has neither."""
    if is_there(folder / TEKKEN):
        return folder / TEKKEN
    found = {file: match for file in folder.iterdir() if (match := _SENTENCEPIECE.fullmatch(file.name))}
    return max(found, key=lambda file: (int(found[file][1] or 0), file.name), default=None)


def mistral_bundle(path: Path, templates: Mapping[str, str], made: bool) -> TokenizerBundle:
    """path: a result of `tokenizer_file`. templates: chat templates of its folder. made: use the library's template
    instead of these.

    Raises ModelError if the file or the template is not valid.
    """
    by = f"{LIBRARY}-{metadata.version(LIBRARY)}" if made else ""
    # The name is hashed too: it tells for which version of the conversation format the model was trained.
    digest = hashlib.sha256(path.name.encode() + read_bytes(path)).hexdigest()
    names = ",".join(f"{name}={hashlib.sha256(text.encode()).hexdigest()}" for name, text in sorted(templates.items()))

    def convert() -> TokenizerBundle:
        tokenizer = _tokenizer(path)
        known = {name: token for name, token in ROLES.items() if tokenizer.token_to_id(token) is not None}
        text: str = tokenizer.to_str()
        chat = {"default": _template(path)} if made else dict(templates)
        return TokenizerBundle(tokenizer_json=text.encode(), chat_templates=chat, special_tokens=known)

    return cached_bundle(f"mistral {digest} {by} {names} tokenizers-{metadata.version('tokenizers')}", convert)


def _tokenizer(path: Path) -> Any:
    if path.name == TEKKEN:
        from headrace.executor.checkpoints.tokenizers.mistral.tekken import tekken_tokenizer as tokenizer_of
    else:
        from headrace.executor.checkpoints.tokenizers.mistral.sentencepiece_model import (
            sentencepiece_tokenizer as tokenizer_of,
        )
    from tokenizers import processors

    tokenizer = tokenizer_of(path)
    if (bos := tokenizer.token_to_id(BOS)) is None:
        raise ModelError(f"{path} has no special token {BOS}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def _template(path: Path) -> str:
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

        template: str = convert_tokenizer_to_chat_template(path)
    except Exception as error:  # the library's own, ValueError, and what an older one lacks
        version = metadata.version(LIBRARY)
        raise ModelError(f"{LIBRARY} {version} makes no chat template of {path}: {error}") from error
    return template
