"""What `hub.locate` asks of a place that models are fetched from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.checkpoints.hub import HubChoice


class Source(ABC):
    """A hub, by its library. Methods raise what the library raises, which `refusal` reads."""

    name: str
    """As in "found neither here nor on NAME"."""
    cache_name: str
    default_revision: str

    @abstractmethod
    def listing(self, repo: str, choice: HubChoice) -> tuple[list[str] | None, str]:
        """The repository's files; None, and why, where the hub cannot be asked."""

    @abstractmethod
    def fetch(self, repo: str, choice: HubChoice, patterns: Sequence[str]) -> Path:
        """The folder with the files that the patterns name, and perhaps others."""

    @abstractmethod
    def cached(self, repo: str, choice: HubChoice) -> Path:
        """The folder as it is on this machine. Asks nobody."""

    @abstractmethod
    def cached_file(self, repo: str, file: str, choice: HubChoice) -> Path | None:
        """A file of that folder; None where it is not here. Asks nobody."""

    @abstractmethod
    def refusal(self, repo: str, error: Exception, choice: HubChoice) -> ModelError | None:
        """What the hub answered, where the error is its answer: no such repository, revision, or access."""


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
