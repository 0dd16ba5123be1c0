"""`HubLibrary`, the interface of a hub from which `hub.locate` downloads models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.checkpoints.hub import HubChoice


class HubLibrary(ABC):
    """A hub, accessed through its library. Methods raise the library's errors, which `refusal` translates."""

    name: str
    """The hub's name in error messages: "found neither here nor on NAME"."""
    cache_name: str
    default_revision: str

    @abstractmethod
    def listing(self, repo: str, choice: HubChoice) -> tuple[list[str] | None, str]:
        """(the repository's files, ""), or (None, the reason) if the hub cannot be reached."""

    @abstractmethod
    def fetch(self, repo: str, choice: HubChoice, patterns: Sequence[str]) -> Path:
        """Downloads the files that match the patterns. Returns their folder, which may have other files too."""

    @abstractmethod
    def cached(self, repo: str, choice: HubChoice) -> Path:
        """The repository's folder in the local cache. Accesses no network."""

    @abstractmethod
    def cached_file(self, repo: str, file: str, choice: HubChoice) -> Path | None:
        """A file of the repository in the local cache; None if it is not there. Accesses no network."""

    @abstractmethod
    def refusal(self, repo: str, error: Exception, choice: HubChoice) -> ModelError | None:
        """The error to report if the hub refused the request (no such repository or revision, no access); None for
        other errors."""


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
