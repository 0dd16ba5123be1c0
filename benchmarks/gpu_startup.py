"""From starting the engine to the first token on a GPU: a checkpoint in the shape of Llama-3.1-8B, its files in memory.

    python benchmarks/gpu_startup.py --folder FOLDER --out results/gpu_startup.json [--dry]

FOLDER is filled with 16 GB of random bf16 weights in eight safetensors files unless they are there, and is read once
before each start, so that the files are in the page cache. To reach: 15 s.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_common
import torch
from report import write_report
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.executor.dummy_shapes import weight_shapes
from headrace.executor.families import spec_from_config
from headrace.executor.gpu_weights import DeviceDummyWeights

NUM_FILES = 8
READ_BYTES = 16 << 20


def make_checkpoint(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """Random weights under their Hugging Face names, with an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = weight_shapes(spec_from_config(config))
    source = DeviceDummyWeights(shapes, torch.bfloat16, device)
    names, weight_map = sorted(shapes), dict[str, str]()
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        part = {name: source.get(name).cpu().contiguous() for name in names[number::NUM_FILES]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(folder: Path) -> int:
    """Bytes that are now in the page cache."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            while data := opened.read(READ_BYTES):
                total += len(data)
    return total


def start_once(folder: Path, device: str) -> dict[str, float]:
    began_s = time.perf_counter()
    with LLM(str(folder), device=device, skip_tokenizer_init=True, max_model_len=2048) as llm:
        ready_s = time.perf_counter() - began_s
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(range(2, 18))}], params, use_tqdm=False)
        first_token_s = time.perf_counter() - began_s
    return {"ready_s": ready_s, "first_token_s": first_token_s}


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; else a temporary one")
    parser.add_argument("--model", choices=list(gpu_common.MODELS), default="llama-8b")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.dry:
        arguments.model, arguments.repeats = "tiny", 1
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-") as temporary:
        folder = arguments.folder or Path(temporary)
        device = gpu_common.device_of(arguments.dry, arguments.device)
        make_checkpoint(folder, gpu_common.MODELS[arguments.model], device)
        size_bytes = read_all(folder)
        starts = [start_once(folder, str(device)) for _ in range(arguments.repeats)]
    median_s = statistics.median(each["first_token_s"] for each in starts)
    # The first start compiles the Triton kernels unless they are in its cache; later ones find them there.
    print(f"{size_bytes / 1e9:.1f} GB: first token after {median_s:.1f} s (each: {starts})")
    if arguments.out:
        results = {
            "model": arguments.model,
            "checkpoint_bytes": size_bytes,
            "first_token_s": median_s,
            "starts": starts,
        }
        write_report(arguments.out, "gpu_startup", results)


if __name__ == "__main__":
    main()
