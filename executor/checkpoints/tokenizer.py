"""`load_bundle` reads a model's tokenizer in the form that frontends use, and converts it if it has another form.

transformers is imported only to convert. The result is cached on disk (converted_tokenizers.py), so a second start of
the same model does not import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints import mistral
from headrace.executor.checkpoints.checkpoint import MISTRAL_PARAMS, Checkpoint, read_json
from headrace.executor.checkpoints.converted_tokenizers import WITHOUT, cached_bundle, is_installed
from headrace.executor.checkpoints.gguf.header import GGUFHeader
from headrace.executor.checkpoints.gguf.tokenizer import gguf_bundle
from headrace.executor.checkpoints.hub import HubChoice, locate
from headrace.executor.checkpoints.mistral.sentencepiece_model import check_readable
from headrace.executor.checkpoints.remote_code import with_code
from headrace.executor.checkpoints.tiktoken_files import TiktokenKind, tiktoken_json, tiktoken_kind
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import TokenizerBundle

# Files that transformers can convert if there is no tokenizer.json.
SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
SLOW_PATTERNS = ("*.tiktoken",)
OF_MISTRAL = "tekken.json or tokenizer.model.v1 to v7"


def load_bundle(checkpoint: Checkpoint, options: Options) -> TokenizerBundle | None:
    """The tokenizer that the options name, else the model's own; None with skip_tokenizer_init.

    Raises ModelError if there is none, or it cannot be read or converted; OptionError if tokenizer_mode does not fit.
    """
    if options.skip_tokenizer_init:
        return None
    header = checkpoint.gguf.header if checkpoint.gguf is not None else None
    path = checkpoint.path
    if options.tokenizer:
        # `beside` sets load_format=dummy, so that no weights are fetched with the tokenizer.
        try:
            path = locate(options.tokenizer, HubChoice.of(options).beside(options.tokenizer_revision))
        except ModelError as error:
            raise ModelError(f"tokenizer={options.tokenizer}: {error}", hint=error.hint) from None
        header = GGUFHeader(path) if path.is_file() else None
    if header is not None:
        if options.tokenizer_mode == "mistral":
            raise OptionError(f"tokenizer_mode=mistral is for {OF_MISTRAL}, and {path} has its tokenizer in itself")
        return _gguf(header)
    if options.tokenizer_mode == "mistral":
        return _of_mistral(path)
    if (path / "tokenizer.json").is_file():
        return _fast(path)
    if (file := _only_mistrals(path)) is not None:
        return _without_mode(file)
    if (kind := tiktoken_kind(path, _config(path))) is not None:
        return _of_tiktoken(path, kind)
    return _slow(with_code(path, options), options.trust_remote_code)


def _gguf(header: GGUFHeader) -> TokenizerBundle:
    architecture = header.metadata.get("general.architecture")
    made_from = f"gguf {architecture} {header.digest('tokenizer.')} {_library_versions()}"
    return cached_bundle(made_from, lambda: gguf_bundle(header))


def _library_versions() -> str:
    return " ".join(f"{name}-{metadata.version(name)}" for name in ("tokenizers", "transformers"))


def _fast(folder: Path) -> TokenizerBundle:
    """A folder's tokenizer.json with the tokens that the files beside it add, as transformers reads them."""
    path = folder / "tokenizer.json"
    config = _config(folder)
    special = _special_tokens(folder, config)
    data = path.read_bytes()
    try:
        data = _completed(data, config, special)
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"{path} cannot be read by tokenizers {metadata.version('tokenizers')}: {error}") from error
    return TokenizerBundle(tokenizer_json=data, chat_templates=_chat_templates(folder, config), special_tokens=special)


def _completed(data: bytes, config: Mapping[str, Any], special: Mapping[str, str]) -> bytes:
    """The tokenizer.json with the tokens of tokenizer_config.json that it lacks, as in transformers 5.

    Its post-processor alone decides which special tokens surround a text; add_bos_token is ignored.
    """
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    entries = [listed[key] for key in sorted(listed, key=int)] if isinstance(listed, Mapping) else []
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    missing = [
        AddedToken(**{name: entry[name] for name in fields if name in entry})
        for entry in entries
        if entry["content"] not in known
    ]
    known |= {token.content for token in missing}
    missing += [AddedToken(text, special=True) for text in dict.fromkeys(special.values()) if text not in known]
    tokenizer.add_tokens(missing)
    return tokenizer.to_str().encode() if missing else data


def _of_tiktoken(folder: Path, kind: TiktokenKind) -> TokenizerBundle:
    """Converts a tokenizer in tiktoken's file format, with its chat templates and special tokens."""
    config = _config(folder)
    digest = hashlib.sha256(f"{_library_versions()} {kind}".encode())
    for file in (folder / kind.file, *sorted(folder.glob("*.json")), *sorted(folder.rglob("*.jinja"))):
        if not file.name.endswith(".index.json"):
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())

    def convert() -> TokenizerBundle:
        data = tiktoken_json(folder, kind, config)
        return TokenizerBundle(
            tokenizer_json=data,
            chat_templates=_chat_templates(folder, config),
            special_tokens=_special_tokens(folder, config),
        )

    return cached_bundle(f"tiktoken {digest.hexdigest()}", convert)


def _of_mistral(folder: Path) -> TokenizerBundle:
    """The tokenizer of tokenizer_mode=mistral. Raises OptionError if the folder has no file for it, or the library is
    not installed."""
    file = mistral.tokenizer_file(folder)
    if file is None:
        raise OptionError(f"tokenizer_mode=mistral reads {OF_MISTRAL}, and {folder} has none; use auto")
    mistral.check_installed()
    return mistral.mistral_bundle(file, {}, made=True)


def _only_mistrals(folder: Path) -> Path | None:
    """Mistral's own tokenizer file, if the folder has no other tokenizer; else None. Other families also have a
    tokenizer.model: it has a tokenizer_config.json beside it, or no params.json."""
    file = mistral.tokenizer_file(folder)
    if file is None or file.name == mistral.TEKKEN:
        return file
    is_others = file.name == "tokenizer.model" and not (folder / MISTRAL_PARAMS).is_file()
    return None if is_others or (folder / "tokenizer_config.json").is_file() else file


def _without_mode(file: Path) -> TokenizerBundle:
    """Mistral's tokenizer without tokenizer_mode=mistral: with the folder's chat templates or, if it has none, with
    that of the library, if it is installed."""
    templates = _chat_templates(file.parent, _config(file.parent))
    return mistral.mistral_bundle(file, templates, made=not templates and is_installed(mistral.LIBRARY))


def _slow(folder: Path, trust_remote_code: bool) -> TokenizerBundle:
    """A tokenizer in an older file format, converted by transformers. Raises ModelError if there is none."""
    files = [folder / name for name in SLOW_FILES if (folder / name).is_file()]
    files += [file for pattern in SLOW_PATTERNS for file in sorted(folder.glob(pattern))]
    if not files:
        looked_for = ", ".join(("tokenizer.json", *SLOW_FILES, *SLOW_PATTERNS, mistral.TEKKEN, "tokenizer.model.v*"))
        raise ModelError(f"{folder} holds no tokenizer: none of {looked_for} is there", hint=WITHOUT)
    digest = hashlib.sha256(f"{_library_versions()} {trust_remote_code}".encode())
    beside = (*folder.glob("*.json"), *folder.glob("*.txt"), *folder.glob("*.jinja"))
    for file in sorted({*files, *beside}):
        if not file.name.endswith(".index.json"):
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return cached_bundle(f"folder {digest.hexdigest()}", lambda: _convert(folder, trust_remote_code))


def _convert(folder: Path, trust_remote_code: bool) -> TokenizerBundle:
    if models := sorted(folder.glob("*.model")):
        check_readable(models[0])
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever a missing library, an unknown class or a damaged file leads to
        raise ModelError(f"the tokenizer in {folder} cannot be converted: {error}", hint=WITHOUT) from error
    special = {name: str(text) for name, text in converted.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerBundle(
        tokenizer_json=backend.to_str().encode(),
        chat_templates=_chat_templates(folder, _config(folder)),
        special_tokens=special,
    )


def _config(folder: Path) -> dict[str, Any]:
    return _read_json(folder / "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where the file is missing. Raises ModelError for anything else."""
    return read_json(path) if path.is_file() else {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role (bos_token, ...), from tokenizer_config.json, else from special_tokens_map.json."""
    merged = _read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    found = {}
    for name, value in merged.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Those in files of their own take precedence over the config's chat_template, which is one
    template or a list of named ones."""
    held = config.get("chat_template")
    found: dict[str, Any] = {"default": held}
    if isinstance(held, list):
        found = {str(each.get("name")): each.get("template") for each in held if isinstance(each, Mapping)}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found |= {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {name: text for name, text in found.items() if isinstance(text, str)}
