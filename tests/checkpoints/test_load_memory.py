"""The memory that loading takes: packed weights, and of the files they are packed from only what is being read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file
from tiny_gguf import save_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.kernels.cpu import build

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

HIDDEN, INNER, VOCABULARY = 1024, 4096, 1024
SHAPES = {
    **dict.fromkeys((f"self_attn.{each}_proj" for each in "qkvo"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, HIDDEN)),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float16",
}  # fmt: skip
MOST_MEMORY = 1.15
"""Of the packed weights, and the largest tensor as float32. Files that stayed mapped as a whole would make it more
than 2."""
LARGEST_BYTES = HIDDEN * INNER * 4
RETURNED_ON_FREE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""A freed buffer leaves the process. glibc's own threshold rises with each large buffer that is freed, up to 32 MiB:
what its heap kept of those differed by 40 MB between equal runs, which says nothing about the loader."""


def write_quantised(folder: Path, form: tuple[dict[str, Any], made.Writer], num_layers: int) -> Path:
    """Every layer has the same weights."""
    config, writer = form
    random = torch.Generator().manual_seed(0)
    of_shape = {shape: writer("", torch.randn(shape, generator=random) * 0.03)[0] for shape in set(SHAPES.values())}
    layer = {name: of_shape[shape] for name, shape in SHAPES.items()}
    tensors = {"model.embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
        for name, parts in layer.items():
            tensors |= {f"{prefix}{name}{part}": each.contiguous().clone() for part, each in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"num_hidden_layers": num_layers, "quantization_config": config})
    )
    return folder


def write_gguf(folder: Path, num_layers: int) -> Path:
    config = {name: value for name, value in CONFIG.items() if name not in ("architectures", "dtype")}
    model = LlamaForCausalLM(LlamaConfig(**config, num_hidden_layers=num_layers)).bfloat16()
    folder.mkdir()
    return save_gguf(model, folder / "model.gguf", GGMLQuantizationType.Q8_0)


CASES: dict[str, tuple[Callable[[Path, int], Path], int]] = {
    "W4A16": (lambda folder, count: write_quantised(folder, made.compressed("W4A16", **made.W4), count), 20),
    "gptq": (lambda folder, count: write_quantised(folder, made.gptq(symmetric=False), count), 20),
    "fp8": (lambda folder, count: write_quantised(folder, made.fp8("blocks"), count), 12),
    "GGUF": (write_gguf, 12),
}


@pytest.mark.system
@pytest.mark.parametrize("case", CASES)
def test_loading_does_not_hold_the_files_and_the_packed_weights_both(case: str, tmp_path: Path) -> None:
    write, num_layers = CASES[case]
    small, large = write(tmp_path / "small", 1), write(tmp_path / "large", num_layers)
    program = Path(__file__).parents[1] / "support/load_memory.py"
    command = [sys.executable, str(program), str(small), str(large)]
    environment = os.environ | RETURNED_ON_FREE
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["weights"] > 150e6
    assert found["peak"] < MOST_MEMORY * found["weights"] + LARGEST_BYTES
