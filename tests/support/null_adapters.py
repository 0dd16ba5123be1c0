"""Adapters for the null executor, which draws other tokens for other files, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE = "null"


def write(folder: Path, content: str, **config: Any) -> str:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"r": 8, "peft_type": "LORA", "base_model_name_or_path": BASE, **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)
