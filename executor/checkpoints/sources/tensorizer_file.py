"""Reads files that CoreWeave's library `tensorizer` wrote from a Hugging Face model (`--load-format tensorizer`). The
library reads all tensors into memory, from a local file, an HTTP server or an S3 bucket."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from headrace.executor.checkpoints.hub.sources import first_line
from headrace.executor.checkpoints.sources.held_weights import TensorWeights
from headrace.executor.checkpoints.sources.library_readers import require
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.struct_types import threadsafe

LIBRARY, FILE = "tensorizer", "model.tensors"
SETTINGS = "model_loader_extra_config"
NOT_TAKEN: Mapping[str, str] = MappingProxyType(
    {
        "s3_access_key_id": "others see it there; use S3_ACCESS_KEY_ID in the environment",
        "s3_secret_access_key": "others see it there; use S3_SECRET_ACCESS_KEY in the environment",
        "vllm_tensorized": "the layout of vLLM's own modules is not read; write the Hugging Face model",
        "lora_dir": "LoRA adapters are not supported yet",
        "serialization_kwargs": "files are read here, and not written",
        "deserialization_kwargs": "num_readers, verify_hash and encryption_keyfile are what can be set",
        "stream_kwargs": "s3_endpoint is what can be set",
    }
)
"""Keys of vLLM's TensorizerConfig that are refused if they are set, and the reason."""
REMOTE = ("http", "https", "s3", "redis")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_COMPUTED = re.compile(r"(inv_freq|embed_scale)$")
"""Buffers of transformers' modules that the library writes with the weights. They are skipped, since they are computed
from the config."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings in model_loader_extra_config, or in its tensorizer_config, named as in vLLM's TensorizerConfig."""

    tensorizer_uri: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    tensorizer_dir: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    num_readers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    verify_hash: bool = False
    encryption_keyfile: str | None = None
    s3_endpoint: str | None = None


@dataclass(frozen=True)
class TensorizerFile:
    """Location of a model's tensors, and the settings to read them. Nothing is read before `weights`."""

    uri: str
    settings: Settings

    @property
    def path(self) -> Path | None:
        """The local path; None for a remote URI."""
        return None if _SCHEME.match(self.uri) else Path(self.uri).expanduser()

    def weights(self) -> TensorWeights:
        """Reads all tensors. Raises ModelError, naming the file, if it is truncated, of another format, does not match
        its hash (verify_hash), or was written from vLLM's own modules."""
        tensors = self._read()
        if any("vllm_tensorized_marker" in name for name in tensors):
            raise ModelError(
                f"{self.uri} was written of vLLM's own modules, which hold matrices as other models do not",
                hint="TensorSerializer(file).write_module(model) of the Hugging Face model writes what is read here",
            )
        return TensorWeights({name: tensor for name, tensor in tensors.items() if not _COMPUTED.search(name)})

    def _read(self) -> dict[str, Any]:
        from tensorizer import DecryptionParams, TensorDeserializer
        from tensorizer.stream_io import open_stream

        asked, how = self.settings, dict[str, Any]()
        where = {
            "s3_access_key_id": os.environ.get("S3_ACCESS_KEY_ID"),
            "s3_secret_access_key": os.environ.get("S3_SECRET_ACCESS_KEY"),
            "s3_endpoint": asked.s3_endpoint or os.environ.get("S3_ENDPOINT_URL"),
        }
        if asked.num_readers is not None:
            how["num_readers"] = asked.num_readers
        try:
            if asked.encryption_keyfile is not None:
                how["encryption"] = DecryptionParams.from_key(Path(asked.encryption_keyfile).expanduser().read_bytes())
            with (
                open_stream(self.uri, "rb", **{name: value for name, value in where.items() if value}) as stream,
                TensorDeserializer(stream, device="cpu", verify_hash=asked.verify_hash, **how) as tensors,
            ):
                return dict(tensors.items())
        except Exception as error:  # whatever the library, its HTTP program and boto3 raise
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ModelError(f"tensorizer cannot read {self.uri}: {said}") from error


def tensorizer_file(folder: Path, given: Mapping[str, Any]) -> TensorizerFile:
    """given: model_loader_extra_config. If it gives no location, the file is model.tensors in `folder`.

    Raises OptionError if the library is not installed or a setting is not valid, ModelError if there is no such file.
    """
    require(LIBRARY, "tensorizer")
    settings = _settings(given)
    if settings.tensorizer_uri is not None and settings.tensorizer_dir is not None:
        raise OptionError(f"{SETTINGS} has tensorizer_uri and tensorizer_dir: give one of them")
    base = settings.tensorizer_dir or str(folder)
    found = TensorizerFile(settings.tensorizer_uri or f"{base.rstrip('/')}/{FILE}", settings)
    scheme = _SCHEME.match(found.uri)
    if scheme is not None and scheme[1] not in REMOTE:
        raise OptionError(f"{SETTINGS} has {found.uri}: it must be a path, or a URI of {', '.join(REMOTE)}")
    if found.path is not None and not found.path.is_file():
        raise ModelError(
            f"there is no file {found.path} of tensorizer's",
            hint=f'{SETTINGS} names another: {{"tensorizer_uri": ...}}',
        )
    return found


def _settings(given: Mapping[str, Any]) -> Settings:
    inner = given.get("tensorizer_config", {})
    if not isinstance(inner, Mapping):
        raise OptionError(f"{SETTINGS}: tensorizer_config must be an object")
    asked = {name: value for name, value in {**given, **inner}.items() if name != "tensorizer_config"}
    for name in asked.keys() & NOT_TAKEN.keys():
        if asked.pop(name) not in (None, False, {}):
            raise OptionError(f"{SETTINGS}: {name} is refused: {NOT_TAKEN[name]}")
    try:
        return msgspec.convert(asked, threadsafe(Settings))
    except msgspec.ValidationError as error:
        raise OptionError(f"{SETTINGS}: {error}; known: {', '.join(Settings.__struct_fields__)}") from None
