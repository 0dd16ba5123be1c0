"""The demo model as a folder of safetensors, for programs of others that do not read GGUF.

    python benchmarks/demo_folder.py FOLDER

Needs `accelerate`, with which transformers reads GGUF.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.executor.checkpoints.demo_model import fetch_demo_model


def write_demo(folder: Path) -> None:
    file = fetch_demo_model()
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: each.contiguous() for name, each in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    write_demo(Path(sys.argv[1]))
