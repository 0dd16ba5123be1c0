"""ModelScope, through its library, which reads MODELSCOPE_API_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_CACHE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.executor.checkpoints.hub.sources import HubLibrary, first_line
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError

if TYPE_CHECKING:
    from headrace.executor.checkpoints.hub import HubChoice

USE = "HEADRACE_USE_MODELSCOPE"
"""Environment variable: whether models come from ModelScope."""
OF_VLLM = "VLLM_USE_MODELSCOPE"
"""vLLM's variable. An engine sets `USE` from it, but it is also read here, for scripts that start no engine."""
TOKEN_HINT = "give a token of yours by MODELSCOPE_API_TOKEN in the environment"
NOT_FOUND, DENIED = 404, (401, 403)


def is_asked_for() -> bool:
    """Whether the environment asks for ModelScope. Raises OptionError for a value that is not a boolean."""
    name = USE if os.environ.get(USE) else OF_VLLM
    text = os.environ.get(name, "").strip().lower()
    if text not in ("", "0", "1", "false", "true"):
        raise OptionError(f"{name}={text}: it must be 1 or 0, or true or false")
    return text in ("1", "true")


class ModelScope(HubLibrary):
    name = "ModelScope"
    cache_name = "ModelScope's cache"
    default_revision = "master"

    def __init__(self) -> None:
        """Raises OptionError where the library is not installed."""
        if util.find_spec("modelscope") is None:
            raise OptionError(f"{USE} needs modelscope, which is not installed: {how_to_install('modelscope')}")

    def listing(self, repo: str, choice: HubChoice) -> tuple[list[str] | None, str]:
        from modelscope.hub.api import HubApi

        if choice.token is not None:
            raise OptionError(f"hf_token is for Hugging Face's hub, and {USE} is set: {TOKEN_HINT}")
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):  # as vLLM does
            return None, "HF_HUB_OFFLINE is set"
        revision = choice.revision or self.default_revision
        try:
            files = HubApi().get_model_files(repo, revision=revision, recursive=True)
        except Exception as error:  # the library's errors, those of requests and OSError, with no common base
            if _status(error) is not None:
                raise
            return None, f"ModelScope cannot be reached ({first_line(error)})"
        return [each["Path"] for each in files if each.get("Type") != "tree"], ""

    def fetch(self, repo: str, choice: HubChoice, patterns: Sequence[str]) -> Path:
        return self._snapshot(repo, choice, allow_patterns=list(patterns))

    def cached(self, repo: str, choice: HubChoice) -> Path:
        return self._snapshot(repo, choice, local_files_only=True)

    def cached_file(self, repo: str, file: str, choice: HubChoice) -> Path | None:
        try:
            found = self.cached(repo, choice) / file
        except Exception:  # whatever the library raises for a model that is not in its cache
            return None
        return found if found.is_file() else None

    def refusal(self, repo: str, error: Exception, choice: HubChoice) -> ModelError | None:
        status = _status(error)
        if status == NOT_FOUND:
            revision = choice.revision or self.default_revision
            return ModelError(
                f"there is no {repo} with a branch, tag or commit {revision}, or it is private",
                hint=f"for a private one, {TOKEN_HINT}",
            )
        if status in DENIED:
            return ModelError(f"{repo} may not be read: {first_line(error)}", hint=TOKEN_HINT)
        return None

    @staticmethod
    def _snapshot(repo: str, choice: HubChoice, **which: object) -> Path:
        from modelscope.hub.snapshot_download import snapshot_download

        return Path(snapshot_download(repo, revision=choice.revision, cache_dir=choice.download_dir, **which))


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an answer from the hub, if it is 404, 401 or 403; else None. The library keeps it in the
    error, its response, or its cause."""
    while error is not None:
        for holder in (error, getattr(error, "response", None)):
            status = getattr(holder, "status_code", None)
            if isinstance(status, int) and (status == NOT_FOUND or status in DENIED):
                return status
        error = error.__cause__
    return None
