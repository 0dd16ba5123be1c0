"""`HfHubResolver`: adapters in chosen repositories of the Hugging Face hub, at their root or in a folder of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.frontend.adapters.folder_resolver import adapter_at, is_below
from headrace.frontend.adapters.resolver import LoRAResolver
from headrace.frontend.request.lora_request import LoRARequest
from headrace.ipc.adapters import CONFIG_NAME
from headrace.ipc.failure import let_interrupts_pass

logger = logging.getLogger(__name__)
_FILES = (CONFIG_NAME, "adapter_model.*")
REMEMBERED_S = 60.0
"""How long a repository's list of files counts: names that it does not have cost no request meanwhile."""
FAILED_S = 5.0
"""How long the hub is not asked again after it failed."""


class HfHubResolver(LoRAResolver):
    """Names are `OWNER/REPOSITORY` or `OWNER/REPOSITORY/FOLDER`. Only an adapter's own files are fetched."""

    def __init__(self, repo_list: Sequence[str]) -> None:
        self._repositories = [_Repository(each) for each in repo_list]

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        for each in self._repositories:
            if (lora_name == each.name or lora_name.startswith(f"{each.name}/")) and is_below(lora_name):
                at = await each.folder(lora_name[len(each.name) + 1 :])
                return None if at is None else await asyncio.to_thread(adapter_at, at, base_model_name, lora_name)
        return None


class _Repository:
    """Asks the hub once in REMEMBERED_S for the list of a repository's files, and once for each adapter in it, however
    many names clients make up. One request runs at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._asking = asyncio.Lock()
        self._listed_s, self._has_failed = -math.inf, False
        self._files: frozenset[str] = frozenset()
        self._fetched: dict[str, Path | None] = {}

    async def folder(self, name: str) -> Path | None:
        """The adapter's folder here, fetched; None if the repository has none of this name."""
        prefix = f"{name}/" if name else ""
        async with self._asking:
            if time.monotonic() - self._listed_s >= (FAILED_S if self._has_failed else REMEMBERED_S):
                self._has_failed = False
                self._files, self._fetched = await asyncio.to_thread(self._list), {}
                self._listed_s = time.monotonic()
            if prefix + CONFIG_NAME not in self._files:
                return None
            if name not in self._fetched:
                self._fetched[name] = await asyncio.to_thread(self._fetch, name, prefix)
            return self._fetched[name]

    def _list(self) -> frozenset[str]:
        import huggingface_hub as hub

        with self._forgiving("its list of files"):
            return frozenset(hub.list_repo_files(self.name))
        return frozenset()

    def _fetch(self, name: str, prefix: str) -> Path | None:
        import huggingface_hub as hub

        with self._forgiving(f"the LoRA adapter {name}"):
            return Path(hub.snapshot_download(self.name, allow_patterns=[prefix + each for each in _FILES]), name)
        return None

    @contextlib.contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # of the network, of the hub, for a repository that needs a key, a panic
            let_interrupts_pass(error)
            logger.warning("%s: %s was not fetched: %s: %s", self.name, what, type(error).__name__, error)
            self._has_failed = True
