"""Whether a model's name is a path of this machine, and what is there; without torch, so that a typing error is told
before anything is imported."""

from __future__ import annotations

import difflib
from pathlib import Path

from headrace.ipc.failure import ModelError

_BEGINNINGS = (".", "~", "/")


def is_path(model: str) -> bool:
    """Whether the name can only be a path. Others may also be of a hub's repository."""
    return model.startswith(_BEGINNINGS)


def check_path_exists(model: str) -> None:
    """Raises ModelError for a path where there is nothing, with the nearest name beside it."""
    if not is_path(model):
        return
    path = Path(model).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}{nearest_path(path)}") from None
    except OSError as error:
        raise ModelError(f"there is no model at {model!r:.200}: {error.strerror}") from error


def nearest_path(path: Path) -> str:
    """A suggestion, as text in parentheses, if a folder or file beside `path` has a similar name; else ""."""
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir() or each.suffix == ".gguf"]
    except OSError:
        return f" (nor is there a folder {path.parent})"
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
