"""The models that this machine keeps: the Hugging Face hub's cache, and the demo model in our own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.executor.checkpoints.demo_model import FILE_NAME, NAME, demo_model_path, fetch_demo_model
from headrace.executor.checkpoints.hub import HubChoice, locate
from headrace.ipc.failure import ModelError


@dataclass(frozen=True)
class KeptModel:
    name: str
    """As `--model` takes it, but for the demo model, which is the default."""
    size_bytes: int
    used_s: float
    """When a file of it was read last, in seconds since the epoch, as far as the file system keeps that."""
    path: Path
    remove: Callable[[], None]
    """Frees its space. Raises OSError."""


def kept_models() -> list[KeptModel]:
    """By name. Raises OSError where a cache cannot be read."""
    return sorted([*_demo(), *_of_hub()], key=lambda model: model.name.lower())


def fetch(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Downloads a model, with a progress bar of the hub's library for each file. Raises ModelError, OptionError."""
    if name in (NAME, FILE_NAME):
        return fetch_demo_model()
    return locate(name, HubChoice(revision=revision, download_dir=download_dir))


def remove(name: str) -> KeptModel:
    """Removes all revisions of a model, and returns what it was. Raises ModelError if it is not kept."""
    for model in kept_models():
        if model.name == name:
            try:
                model.remove()
            except OSError as error:
                raise ModelError(f"{name} cannot be removed: {error}") from error
            return model
    names = ", ".join(model.name for model in kept_models())
    raise ModelError(f"no model {name} is kept here; there are {names or 'none'}")


def _demo() -> list[KeptModel]:
    path = demo_model_path()
    if not path.is_file():
        return []
    status = path.stat()
    return [KeptModel(NAME, status.st_size, status.st_atime, path, path.unlink)]


def _of_hub() -> list[KeptModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []

    def remover(revisions: list[str]) -> Callable[[], None]:
        return lambda: cache.delete_revisions(*revisions).execute()

    return [
        KeptModel(
            repo.repo_id,
            repo.size_on_disk,
            repo.last_accessed,
            repo.repo_path,
            remover([revision.commit_hash for revision in repo.revisions]),
        )
        for repo in cache.repos
        if repo.repo_type == "model"
    ]
