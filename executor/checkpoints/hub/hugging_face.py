"""The Hugging Face hub, through huggingface_hub, which reads HF_HUB_OFFLINE, HF_TOKEN (unless hf_token is given) and
HF_ENDPOINT, and has its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.executor.checkpoints.hub.sources import HubLibrary, first_line
from headrace.ipc.failure import ModelError

if TYPE_CHECKING:
    from headrace.executor.checkpoints.hub import HubChoice

TIMEOUT_S = 10.0
TOKEN_HINT = "give a token of yours by HF_TOKEN in the environment, or hf_token"
NOT_OPENED = "give another hf_token: this one does not open it"


class HuggingFace(HubLibrary):
    name = "the Hugging Face hub"
    cache_name = "the hub's cache"
    default_revision = "main"

    def listing(self, repo: str, choice: HubChoice) -> tuple[list[str] | None, str]:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors

        if constants.HF_HUB_OFFLINE:
            return None, "HF_HUB_OFFLINE is set"
        try:
            info = hub.HfApi(token=_how(choice)["token"]).model_info(repo, revision=choice.revision, timeout=TIMEOUT_S)
            return [each.rfilename for each in info.siblings or ()], ""
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
            raise
        except Exception as error:  # no network: whatever the HTTP library raises
            return None, f"the hub cannot be reached ({first_line(error)})"

    def fetch(self, repo: str, choice: HubChoice, patterns: Sequence[str]) -> Path:
        import huggingface_hub as hub

        return Path(hub.snapshot_download(repo, allow_patterns=list(patterns), **_how(choice)))

    def cached(self, repo: str, choice: HubChoice) -> Path:
        import huggingface_hub as hub

        try:
            return Path(hub.snapshot_download(repo, local_files_only=True, **_how(choice)))
        except Exception as error:
            # Newer versions raise if a snapshot lacks any file of the repository, even one that was not requested.
            partial = getattr(error, "snapshot_path", None)
            if partial is None:
                raise
            return Path(partial)

    def cached_file(self, repo: str, file: str, choice: HubChoice) -> Path | None:
        import huggingface_hub as hub

        try:
            found = hub.try_to_load_from_cache(repo, file, choice.download_dir, choice.revision)
        except ValueError:  # not a valid repository name
            return None
        return Path(found) if isinstance(found, str) else None

    def refusal(self, repo: str, error: Exception, choice: HubChoice) -> ModelError | None:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            token = NOT_OPENED if choice.token is not None else TOKEN_HINT
            return ModelError(f"{repo} is gated", hint=f"ask for access on its page, and {token}")
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(f"{repo} has no branch, tag or commit {choice.revision or self.default_revision}")
        if isinstance(error, errors.RepositoryNotFoundError):
            token = NOT_OPENED if choice.token is not None else TOKEN_HINT
            return ModelError(f"there is no {repo}, or it is private", hint=f"for a private one, {token}")
        return None


def _how(choice: HubChoice) -> dict[str, Any]:
    """Arguments of the library's download functions."""
    token = choice.token and choice.token.value
    return {"revision": choice.revision, "cache_dir": choice.download_dir, "token": token}
