"""`FilesystemResolver`: adapters below one folder, each in a folder of its name."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from headrace.frontend.adapters.resolver import LoRAResolver
from headrace.frontend.request.lora_request import LoRARequest
from headrace.ipc.adapters import CONFIG_NAME, MOST_CONFIG_BYTES
from headrace.ipc.process.regular_files import read_file


class FilesystemResolver(LoRAResolver):
    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not is_below(lora_name):
            return None
        path = Path(self.lora_cache_dir, lora_name)
        return await asyncio.to_thread(adapter_at, path, base_model_name, lora_name)


def is_below(name: str) -> bool:
    """Whether a name that a client sent is one of a file below a folder, and leads nowhere else."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts)


def adapter_at(path: Path, base_model_name: str, lora_name: str) -> LoRARequest | None:
    """The adapter in a folder; None if there is none, or one of another kind or for another model."""
    try:
        config = json.loads(read_file(path / CONFIG_NAME, MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return None
    if not is_same_model(config.get("base_model_name_or_path"), base_model_name):
        return None
    return LoRARequest(lora_name, 1, os.fspath(path))


def is_same_model(named: object, served: str) -> bool:
    """Whether an adapter's base is the served model: the same name, or the same folder."""
    if not isinstance(named, str):
        return False
    return named == served or (os.path.exists(named) and os.path.realpath(named) == os.path.realpath(served))
