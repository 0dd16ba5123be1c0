"""`load_bundle` reads a model's tokenizer in the form that frontends use, and converts it if it has another form.

transformers is imported only to convert. The result is cached on disk (converted_tokenizers.py), so a second start of
the same model does not import it.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import MISTRAL_PARAMS, Checkpoint, read_bytes, read_optional_json
from headrace.executor.checkpoints.hub import HubChoice, locate
from headrace.executor.checkpoints.hub.remote_code import with_code
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader
from headrace.executor.checkpoints.sources.gguf.tokenizer import gguf_bundle
from headrace.executor.checkpoints.tokenizers import mistral
from headrace.executor.checkpoints.tokenizers.converted_tokenizers import WITHOUT, cached_bundle, is_installed
from headrace.executor.checkpoints.tokenizers.folder_templates import folder_templates
from headrace.executor.checkpoints.tokenizers.folder_tokens import completed, folder_tokens
from headrace.executor.checkpoints.tokenizers.sentencepiece_files import (
    SentencePieceModel,
    check_pieces,
    parse,
    read_model,
    reads_ids_of,
)
from headrace.executor.checkpoints.tokenizers.text_ends import add_ends
from headrace.executor.checkpoints.tokenizers.text_flags import with_text_flags
from headrace.executor.checkpoints.tokenizers.tiktoken_files import TiktokenKind, tiktoken_json, tiktoken_kind
from headrace.executor.checkpoints.tokenizers.tokenizer_growth import check_growth
from headrace.executor.checkpoints.tokenizers.tokenizer_keys import check_gguf_keys, check_tokenizer_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.process.regular_files import is_there, read_file
from headrace.ipc.struct_types import threadsafe

# Files that transformers can convert if there is no tokenizer.json.
SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
SENTENCEPIECE_FILES = SLOW_FILES[:3]
SLOW_PATTERNS = ("*.tiktoken",)
OF_MISTRAL = "tekken.json or tokenizer.model.v1 to v7"


def load_bundle(checkpoint: Checkpoint, options: Options) -> TokenizerBundle | None:
    """The tokenizer that the options name, else the model's own; None with skip_tokenizer_init.

    Raises ModelError if there is none, or it cannot be read or converted; OptionError if tokenizer_mode does not fit.
    """
    if options.skip_tokenizer_init:
        return None
    bundle = _read_bundle(checkpoint, options)
    check_growth(bundle.tokenizer_json, str(options.tokenizer or checkpoint.path))
    return bundle


def _read_bundle(checkpoint: Checkpoint, options: Options) -> TokenizerBundle:
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
    if is_there(path / "tokenizer.json"):
        return _fast(path)
    if (file := _only_mistrals(path)) is not None:
        return _without_mode(file)
    if (kind := tiktoken_kind(path, _config(path))) is not None:
        return _of_tiktoken(path, kind)
    return _slow(with_code(path, options), options)


def end_of_tokenizer(checkpoint: Checkpoint, options: Options) -> int | None:
    """The id of the eos token of the tokenizer that `load_bundle` returns, which ends an answer whatever the model's
    config says: fine-tunes often name their end of turn in the tokenizer alone. None if it has none, or if it is a GGUF
    file's own, whose ends the checkpoint has.

    Mostly, only the list of added tokens is decoded. Raises ModelError and OptionError as `load_bundle`.
    """
    if options.skip_tokenizer_init or (checkpoint.gguf is not None and not options.tokenizer):
        return None
    file = checkpoint.path / "tokenizer.json"
    if not options.tokenizer and options.tokenizer_mode != "mistral" and is_there(file):
        tokens = folder_tokens(checkpoint.path, _config(checkpoint.path))
        named, default = tokens.roles.get("eos_token"), tokens.of_class.get("eos_token")
        text = named if default is None else default
        found = None if text is None else _added_id(read_bytes(file).removeprefix(codecs.BOM_UTF8), text)
        if named is None or found is not None:
            return found
    bundle = load_bundle(checkpoint, options)
    assert bundle is not None
    text = bundle.special_tokens.get("eos_token")
    return None if text is None else _added_id(bundle.tokenizer_json, text)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_id(tokenizer_json: bytes, text: str) -> int | None:
    """The id of an added token; None if it is no such token, or the tokenizer cannot be decoded."""
    try:
        added = msgspec.json.decode(tokenizer_json, type=threadsafe(_TokenizerFile)).added_tokens
    except (msgspec.MsgspecError, RecursionError):
        return None
    return next((token.id for token in added if token.content == text), None)


def _gguf(header: GGUFHeader) -> TokenizerBundle:
    check_gguf_keys(header)
    architecture, name = (header.metadata.get(f"general.{key}") for key in ("architecture", "name"))
    made_from = f"gguf {architecture} {name} {header.digest('tokenizer.')} {_library_versions()}"
    return cached_bundle(made_from, lambda: gguf_bundle(header))


def _library_versions() -> str:
    return " ".join(f"{name}-{metadata.version(name)}" for name in ("tokenizers", "transformers"))


def _fast(folder: Path) -> TokenizerBundle:
    """A folder's tokenizer.json with the tokens that the files beside it add, as transformers reads them.

    Its post-processor alone decides which special tokens surround a text: add_bos_token is ignored, as in
    transformers 5.
    """
    path, config = folder / "tokenizer.json", _config(folder)
    tokens = folder_tokens(folder, config)
    try:
        data = completed(with_text_flags(read_file(path).removeprefix(codecs.BOM_UTF8), config), tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"{path} cannot be read by tokenizers {metadata.version('tokenizers')}: {error}") from error
    of_class = {role: text for role, text in tokens.of_class.items() if _added_id(data, text) is not None}
    return _bundle(folder, config, data, {**of_class, **tokens.roles})


def _bundle(folder: Path, config: Mapping[str, Any], data: bytes, roles: Mapping[str, str]) -> TokenizerBundle:
    side = config.get("truncation_side") or "right"
    if side not in ("left", "right"):
        file = folder / "tokenizer_config.json"
        raise ModelError(f"{file} has the truncation_side {side!r:.100}; left or right is expected")
    return TokenizerBundle(
        tokenizer_json=data,
        chat_templates=folder_templates(folder, config),
        special_tokens=dict(roles),
        split_special_tokens=bool(config.get("split_special_tokens")),
        truncation_side=side,
    )


def _of_tiktoken(folder: Path, kind: TiktokenKind) -> TokenizerBundle:
    """Converts a tokenizer in tiktoken's file format, with its chat templates and special tokens."""
    config = _config(folder)

    def convert() -> TokenizerBundle:
        tokens = folder_tokens(folder, config)
        data = completed(tiktoken_json(folder, kind, config), tokens)
        return _bundle(folder, config, data, tokens.roles)

    return cached_bundle(f"tiktoken {_library_versions()} {kind} {_digest(folder, [folder / kind.file])}", convert)


def _digest(folder: Path, files: Sequence[Path]) -> str:
    """SHA-256, in hexadecimal, of these files and of those beside them that a conversion may read."""
    beside = (*folder.glob("*.json"), *folder.glob("*.txt"), *folder.rglob("*.jinja"))
    digest = hashlib.sha256()
    for file in sorted({*files, *beside}):
        if not file.name.endswith(".index.json"):
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(read_bytes(file)).digest())
    return digest.hexdigest()


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
    is_others = file.name == "tokenizer.model" and not is_there(folder / MISTRAL_PARAMS)
    return None if is_others or is_there(folder / "tokenizer_config.json") else file


def _without_mode(file: Path) -> TokenizerBundle:
    """Mistral's tokenizer without tokenizer_mode=mistral: with the folder's chat templates or, if it has none, with
    that of the library, if it is installed."""
    templates = folder_templates(file.parent, _config(file.parent))
    return mistral.mistral_bundle(file, templates, made=not templates and is_installed(mistral.LIBRARY))


def _slow(folder: Path, options: Options) -> TokenizerBundle:
    """A tokenizer in an older file format, converted. Raises ModelError if there is none."""
    files = [folder / name for name in SLOW_FILES if is_there(folder / name)]
    files += [file for pattern in SLOW_PATTERNS for file in sorted(folder.glob(pattern))]
    if not files:
        looked_for = ", ".join(("tokenizer.json", *SLOW_FILES, *SLOW_PATTERNS, mistral.TEKKEN, "tokenizer.model.v*"))
        raise ModelError(f"{folder} holds no tokenizer: none of {looked_for} is there", hint=WITHOUT)
    config = _config(folder)
    trusted = options.trust_remote_code

    def convert() -> TokenizerBundle:
        if files[0].name in SENTENCEPIECE_FILES and (model := parse(files[0])) is not None:
            if reads_ids_of(config):
                return _of_sentencepiece(folder, config, read_model(files[0], model))
            return _by_transformers(folder, config, trusted, model)
        return _by_transformers(folder, config, trusted, None)

    return cached_bundle(f"folder {_library_versions()} {trusted} {_digest(folder, files)}", convert)


def _of_sentencepiece(folder: Path, config: Mapping[str, Any], model: SentencePieceModel) -> TokenizerBundle:
    tokens = folder_tokens(folder, config)
    roles = {**model.special_tokens, **tokens.roles}
    tokenizer = model.tokenizer(config, {token.token_id: token.text for token in tokens.listed if token.token_id})
    data = completed(tokenizer.to_str().encode(), tokens)
    return _bundle(folder, config, _with_ends(data, config, roles), roles)


def _with_ends(data: bytes, config: Mapping[str, Any], roles: Mapping[str, str]) -> bytes:
    """Without a tokenizer.json, add_bos_token and add_eos_token say what surrounds a text: nothing without them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    bos, eos = (roles.get(f"{end}_token") if config.get(f"add_{end}_token") else None for end in ("bos", "eos"))
    add_ends(tokenizer, bos, eos)
    text: str = tokenizer.to_str()
    return text.encode()


def _by_transformers(folder: Path, config: Mapping[str, Any], trusts: bool, model: Any) -> TokenizerBundle:
    """model: the folder's SentencePiece model, if it has one, with which the conversion is compared."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trusts)
        backend = converted.backend_tokenizer
    except Exception as error:  # whatever a missing library, an unknown class or a damaged file leads to
        raise ModelError(f"the tokenizer in {folder} cannot be converted: {error}", hint=WITHOUT) from error
    special = {name: str(text) for name, text in converted.special_tokens_map.items() if isinstance(text, str)}
    if model is not None:
        check_pieces(model, backend, folder)
    return _bundle(folder, config, backend.to_str().encode(), special)


def _config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json. Raises ModelError for what it asks for that is not supported."""
    path = folder / "tokenizer_config.json"
    config = read_optional_json(path)
    check_tokenizer_config(path, config)
    return config
