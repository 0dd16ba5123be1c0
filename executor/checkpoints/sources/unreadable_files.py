"""What to say of a file of weights that cannot be read."""

from __future__ import annotations

from pathlib import Path

from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import NoFileError, open_file

LFS_POINTER = b"version https://git-lfs"


def unreadable(file: Path, expected: str, reason: str) -> ModelError:
    """The error to raise for a file that is not what was `expected`: it recognises Git LFS pointers."""
    try:
        with open_file(file) as opened:
            start = opened.read(len(LFS_POINTER))
        size = file.stat().st_size
    except NoFileError as cause:
        return ModelError(str(cause))
    except OSError as cause:
        return ModelError(f"{file} cannot be read: {cause.strerror or cause}")
    if start == LFS_POINTER:
        return ModelError(f"{file} is a Git LFS pointer, not the weights; `git lfs pull` in {file.parent} fetches them")
    first_line, _, _ = reason.strip().partition("\n")
    return ModelError(f"{file} ({size} bytes) is not {expected}: {first_line}", hint="fetch it again")
