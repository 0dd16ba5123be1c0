"""The chat templates of a model's folder: which of several files holds, as transformers decides it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.executor.checkpoints.checkpoint import read_optional_json
from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import is_there, read_text

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of models that take more than text. Their processor has a chat template of its own, which comes first."""


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; the usual one is `default`. config: content of tokenizer_config.json.

    First a processor's (processor_config.json, then chat_template.json), then chat_template.jinja with
    additional_chat_templates/, then the config's own. chat_template.json counts beside no processor only where there is
    no other. Raises ModelError for a template that is no text.
    """
    found = _in_files(folder)
    if "default" not in found:
        found = _in_config(folder, config) | found
    processors = [read_optional_json(folder / name) for name in PROCESSOR_FILES]
    legacy = _text(
        folder / "chat_template.json", read_optional_json(folder / "chat_template.json").get("chat_template")
    )
    if legacy and ("default" not in found or any(processors)):
        found["default"] = legacy
    if own := _text(folder / PROCESSOR_FILES[0], processors[0].get("chat_template")):
        found["default"] = own
    return found


def _in_files(folder: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    return {name: _read(file) for name, file in files.items() if is_there(file)}


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _in_config(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer_config.json has one template, or a list of named ones."""
    file, held = folder / "tokenizer_config.json", config.get("chat_template")
    if not isinstance(held, list):
        text = _text(file, held)
        return {} if text is None else {"default": text}
    found = {}
    for entry in held:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        text = _text(file, entry.get("template")) if isinstance(name, str) else None
        if text is None:
            raise ModelError(f"{file}: an entry of chat_template is {entry!r:.80}; a name and a template are expected")
        found[str(name)] = text
    return found


def _text(file: Path, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{file}: chat_template is a {type(value).__name__}; a text is expected")
    return value
