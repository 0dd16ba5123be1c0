"""`HfHubResolver`: adapters in chosen repositories of the Hugging Face hub, at their root or in a folder of theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from headrace.frontend.adapters.folder_resolver import adapter_at, is_below
from headrace.frontend.adapters.lora_request import LoRARequest
from headrace.frontend.adapters.resolver import LoRAResolver
from headrace.ipc.adapters import CONFIG_NAME
from headrace.ipc.failure import let_interrupts_pass

logger = logging.getLogger(__name__)
_FILES = (CONFIG_NAME, "adapter_model.*")


class HfHubResolver(LoRAResolver):
    """Names are `OWNER/REPOSITORY` or `OWNER/REPOSITORY/FOLDER`. Only an adapter's own files are fetched."""

    def __init__(self, repo_list: Sequence[str]) -> None:
        self.repo_list = tuple(repo_list)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        repo = next((each for each in self.repo_list if lora_name == each or lora_name.startswith(f"{each}/")), None)
        if repo is None or not is_below(lora_name):
            return None
        return await asyncio.to_thread(self._fetch, repo, lora_name[len(repo) + 1 :], base_model_name, lora_name)

    def _fetch(self, repo: str, folder: str, base_model_name: str, lora_name: str) -> LoRARequest | None:
        import huggingface_hub as hub

        prefix = f"{folder}/" if folder else ""
        try:
            if not hub.file_exists(repo, prefix + CONFIG_NAME):
                return None
            at = hub.snapshot_download(repo, allow_patterns=[prefix + name for name in _FILES])
        except BaseException as error:  # of the network, of the hub, for a repository that needs a key, a panic
            let_interrupts_pass(error)
            logger.warning("the LoRA adapter %s was not fetched: %s: %s", lora_name, type(error).__name__, error)
            return None
        return adapter_at(Path(at, folder), base_model_name, lora_name)
