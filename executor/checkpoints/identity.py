"""What weights are, in a word that is equal for equal checkpoints wherever they lie.

Engines go on with each other's requests where it is equal (frontend/fleet). So it must differ when a model was trained
on: configs, names and sizes of files are the same then. Reading all of the files would take as long as loading them; of
each a few pages are read, as training moves nearly every weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.checkpoints.checkpoint import Checkpoint

_PAGES, _PAGE_BYTES = 16, 4096
_SAID_OF_FILES = ("_name_or_path", "transformers_version")
"""Of a config: by whom it was written and where it lay, which changes no token."""


def weights_identity(checkpoint: Checkpoint) -> str:
    """16 hexadecimal digits. Raises ModelError where a file cannot be read."""
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
    """Of each file its size, its first and last page, and some between."""
    for path in files:
        try:
            with path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                yield size_bytes.to_bytes(8, "little")
                for number in range(_PAGES):
                    file.seek(max(0, size_bytes - _PAGE_BYTES) * number // (_PAGES - 1))
                    yield file.read(_PAGE_BYTES)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
