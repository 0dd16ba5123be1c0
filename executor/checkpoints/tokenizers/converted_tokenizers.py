"""A disk cache of converted tokenizers, so that each is converted once.

A TokenizerBundle is in <cache>/converted-tokenizers/<key>.msgpack; the key is a hash of all that it was made from.
Files are written under a temporary name and renamed. A file that does not decode is replaced; if the folder cannot be
written, the conversion is repeated at the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from importlib import util
from pathlib import Path

import msgspec

from headrace.ipc.cache import cache_folder
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.process.trusted_files import UntrustedFileError, read_trusted, trusted_folder, warn_of
from headrace.ipc.struct_types import threadsafe

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 2
"""Part of every key: increment it when conversion of the same files should give another bundle."""
WITHOUT = "--tokenizer names another one, and --skip-tokenizer-init runs without"
"""Hint for errors about a tokenizer that is missing or cannot be converted."""


def cached_bundle(made_from: str, make: Callable[[], TokenizerBundle]) -> TokenizerBundle:
    """The cached bundle for `made_from`; if there is none, the result of `make`, which is then cached. Raises what
    `make` raises."""
    key = hashlib.sha256(f"{CONVERSION_VERSION}\n{made_from}".encode()).hexdigest()
    try:
        path = cache_folder() / "converted-tokenizers" / f"{key}.msgpack"
        return msgspec.msgpack.decode(read_trusted(path), type=threadsafe(TokenizerBundle))
    except UntrustedFileError as error:
        warn_of(str(error), "The tokenizer is converted anew.")
    except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # RuntimeError: no home folder
        logger.debug("no converted tokenizer %s: %s", key, error)
    bundle = make()
    with contextlib.suppress(OSError, RuntimeError):
        _store(cache_folder() / "converted-tokenizers" / f"{key}.msgpack", bundle)
    return bundle


def _store(path: Path, bundle: TokenizerBundle) -> None:
    trusted_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.msgpack.encode(bundle))
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def is_installed(module: str) -> bool:
    """Whether a module is installed; it is not imported."""
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False
