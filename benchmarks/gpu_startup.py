"""Time from starting the engine to the first token on a GPU: a checkpoint of Llama-3.1-8B's shape, in the page cache.

    python benchmarks/gpu_startup.py --out results/gpu_startup.json [--folder FOLDER] [--dry]

FOLDER is filled with 16 GB of random bf16 weights in eight safetensors files unless they exist, and is read once before
the first start, so that the files are in the page cache. By default it is a temporary one, in memory where that has
room. The first start compiles the Triton kernels unless they are in Triton's cache; later starts find them there.
Target: 15 s from the call of `LLM()`, which starts an engine-core, to the token.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_common
import torch
from gpu_common import attempt
from gpu_shapes import MODELS, weight_elements
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes

NUM_FILES = 8
READ_BYTES = 16 << 20
MEMORY = Path("/dev/shm")


def roomy_folder(config: dict[str, Any]) -> Path | None:
    """The memory file system if it has twice the needed room; None for the usual temporary folder."""
    needed_bytes = 2 * 2 * (sum(weight_elements(config)) + config["vocab_size"] * config["hidden_size"])
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed_bytes else None


def make_checkpoint(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """Writes random weights under their Hugging Face names, with an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = weight_shapes(spec_from_config(config))
    source = DummyWeights(shapes, torch.bfloat16, device)
    names, weight_map = sorted(shapes), dict[str, str]()
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        part = {name: weight_of(source, name) for name in names[number::NUM_FILES]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_of(source: DummyWeights, name: str) -> torch.Tensor:
    """The weight on the host. Norms are about 1, like trained ones."""
    weight = source.get(name)
    return (weight + 1 if name.endswith("norm.weight") else weight).cpu().contiguous()


def read_all(folder: Path) -> int:
    """Reads all files into the page cache; returns their bytes."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            while data := opened.read(READ_BYTES):
                total += len(data)
    return total


def start_once(folder: Path, device: str) -> dict[str, Any]:
    began_s = time.perf_counter()
    with LLM(str(folder), device=device, skip_tokenizer_init=True, max_model_len=2048) as llm:
        ready_s = time.perf_counter() - began_s
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(range(2, 18))}], params, use_tqdm=False)
        first_token_s = time.perf_counter() - began_s
        phases_s = llm.describe_engine().facts["startup_s"]
    return {"ready_s": ready_s, "first_token_s": first_token_s, "engine_s_by_phase": phases_s}


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; else a temporary one")
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b")
    parser.add_argument("--repeats", type=gpu_common.positive, default=3)
    arguments = parser.parse_args()
    if arguments.dry:
        arguments.model, arguments.repeats = "tiny", 2
    config, device = MODELS[arguments.model], gpu_common.device_of(arguments.dry, arguments.device)
    report = gpu_common.open_report(arguments, "gpu_startup", {"model": arguments.model})
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-", dir=roomy_folder(config)) as temporary:
        folder = arguments.folder or Path(temporary)
        began_s = time.perf_counter()
        make_checkpoint(folder, config, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        made_s, size_bytes = time.perf_counter() - began_s, read_all(folder)
        print(f"{size_bytes / 1e9:.1f} GB written in {made_s:.1f} s", flush=True)
        report.results |= {"checkpoint_bytes": size_bytes, "in_memory": folder.is_relative_to(MEMORY)}
        for number in range(arguments.repeats):
            row = attempt(report, {"start": number}, lambda: start_once(folder, str(device)))
            print(f"start {number}: {row}", flush=True)
    later = [case["first_token_s"] for case in report.results["cases"][1:] if "first_token_s" in case]
    if later:
        report.results["first_token_s"] = statistics.median(later)
        report.save()
        print(f"first token after {report.results['first_token_s']:.1f} s, kernels in Triton's cache")
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
