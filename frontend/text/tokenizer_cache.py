"""A disk cache of tokeniser bundles by the hash of their content, so that a frontend fetches each from a core once.

<cache>/tokenizers/<sha256 of the file>.msgpack    where <cache> is HEADRACE_CACHE or ~/.cache/headrace
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

import msgspec

from headrace.ipc.cache import cache_folder
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import TokenizerBundle, TokenizerInfo
from headrace.ipc.process.trusted_files import read_trusted, trusted_folder
from headrace.ipc.struct_types import threadsafe

_HASH = re.compile(r"[0-9a-f]{64}")


def load_bundle(info: TokenizerInfo) -> TokenizerBundle | None:
    """The cached bundle; None if it is missing, or if its content does not have the hash in its name."""
    try:
        data = read_trusted(_path(info))
        if hashlib.sha256(data).hexdigest() != info.content_hash:
            return None
        return msgspec.msgpack.decode(data, type=threadsafe(TokenizerBundle))
    except (OSError, RuntimeError, msgspec.MsgspecError):
        return None


def store_bundle(info: TokenizerInfo, bundle: TokenizerBundle) -> None:
    """Caches a bundle that a core sent. Raises ModelError if its hash is not the announced one.

    If the folder cannot be written, the bundle is not cached, and is fetched again next time.
    """
    data = msgspec.msgpack.encode(bundle)
    found = hashlib.sha256(data).hexdigest()
    if found != info.content_hash:
        raise ModelError(f"the core sent a tokenizer with hash {found}, and had announced {info.content_hash}")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        path = _path(info)
        trusted_folder(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def _path(info: TokenizerInfo) -> Path:
    if not _HASH.fullmatch(info.content_hash):
        raise ModelError(f"the core names its tokenizer {info.content_hash!r:.100}, which is no SHA-256")
    return cache_folder() / "tokenizers" / f"{info.content_hash}.msgpack"
