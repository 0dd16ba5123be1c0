"""A hash that identifies a checkpoint's weights, independent of where the files are.

Engines with the same hash may continue each other's requests (frontend/fleet). So it must change when a model is
trained further, which changes neither config nor names and sizes of files. Hashing the files whole would take as long
as loading them; a few pages of each suffice, since training changes nearly every weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import NoFileError, open_file

if TYPE_CHECKING:
    from headrace.executor.checkpoints.checkpoint import Checkpoint

_PAGES, _PAGE_BYTES = 16, 4096
_SAID_OF_FILES = ("_name_or_path", "transformers_version")
"""Config fields that are left out of the hash: the path and the library version that wrote the config."""


def weights_identity(checkpoint: Checkpoint) -> str:
    """The hash, 16 hexadecimal digits. Raises ModelError if a file cannot be read."""
    config = {name: value for name, value in checkpoint.config.items() if name not in _SAID_OF_FILES}
    file = checkpoint.tensorizer
    elsewhere = file.uri if file is not None and file.path is None else None
    digest = hashlib.sha256(_canonical([config, checkpoint.format == "dummy", elsewhere]))
    for page in _pages(() if checkpoint.format == "dummy" else checkpoint.weight_files):
        digest.update(page)
    return digest.hexdigest()[:16]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _pages(files: Iterable[Path]) -> Iterable[bytes]:
    """For each file its size (8 bytes), then its first and last page and some in between. Raises ModelError."""
    for path in files:
        try:
            with open_file(path) as file:
                size_bytes = file.seek(0, 2)
                yield size_bytes.to_bytes(8, "little")
                for number in range(_PAGES):
                    file.seek(max(0, size_bytes - _PAGE_BYTES) * number // (_PAGES - 1))
                    yield file.read(_PAGE_BYTES)
        except NoFileError as error:
            raise ModelError(str(error)) from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
