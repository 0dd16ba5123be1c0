"""Compiles the kernels that the jobs of `gpu_all.py` launch, all at once, so that no job waits for a compiler.

    python benchmarks/gpu_compile.py [--case NAME ...]

A model has some 40 kernels, and a job that compiles them one by one waits a minute or more. Here each case is a process
that records the launches of its model's steps on tensors without memory (`tests/support/gpu_launches.py`) and compiles
them in parallel into Triton's cache, where the jobs find them. With a GPU the launcher programs are built too; without
one the kernels are compiled for an H200. A job compiles any further kernels itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

import gpu_shapes  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from gpu_launches import LaunchNotes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton_compile import LaunchRecord  # noqa: E402

from headrace.executor.gpu.kernels import Rounding  # noqa: E402

THREADS = 4
MOST_S = 150
FP32, FP8 = torch.float32, torch.float8_e4m3fn


def tiny(name: str, **options: Any) -> Callable[[], LaunchNotes]:
    """A model of the GPU tests."""

    def notes() -> LaunchNotes:
        import tiny_models

        architecture, config = tiny_models.TINY_MODELS[name].model_class, tiny_models.build(name).config
        return LaunchNotes({**config.to_dict(), "architectures": [architecture]}, **options)

    return notes


def large(config: dict[str, Any], **options: Any) -> Callable[[], LaunchNotes]:
    """Two layers of a model of the benchmarks."""
    return lambda: LaunchNotes({**config, "num_hidden_layers": 2}, **options)


LLAMA, QWEN, ROUNDED = gpu_shapes.LLAMA_8B, gpu_shapes.QWEN3_06B, Rounding("fp8", 32)
CASES: dict[str, Callable[[], LaunchNotes]] = {
    "llama-8b": large(LLAMA),
    "llama-8b fp8": large(LLAMA, rounding=ROUNDED),
    "llama-8b fp8, fp8 cache": large(LLAMA, rounding=ROUNDED, cached=FP8),
    "qwen3-0.6b": large(QWEN),
    "qwen3-0.6b fp32": large(QWEN, dtype=FP32),
    **{f"{name} fp32": tiny(name, dtype=FP32) for name in ("llama_gqa_tied", "qwen3", "gemma2", "llama_dynamic")},
    "mistral_window fp32": tiny("mistral_window", dtype=FP32),
    **{f"{name} bf16": tiny(name) for name in ("llama_gqa_tied", "qwen3")},
    "llama fp32": tiny("llama", dtype=FP32),
    "llama fp32, int8 cache": tiny("llama", dtype=FP32, cached=torch.int8),
    **{f"llama fp32, {kind}": tiny("llama", dtype=FP32, rounding=Rounding(kind, 32)) for kind in ("int8", "int4")},
}


class NoDriver:
    """Triton's driver for a GPU that is not present."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_launches(launches: list[LaunchRecord], num_threads: int) -> int:
    """Compiles into Triton's cache, as the launches would; returns the number of kernels. Raises the first error."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        driver.set_active(NoDriver())
    with ThreadPoolExecutor(num_threads) as threads:
        with triton.AsyncCompileMode(threads):
            kernels = [
                each.function.run(grid=each.grid, warmup=True, **each.arguments, **each.options) for each in launches
            ]
        distinct = list({id(each): each for each in kernels}.values())
        if has_gpu:
            list(threads.map(build_launcher, distinct))
    return len(distinct)


def build_launcher(kernel: Any) -> None:
    """kernel: as `JITFunction.run` returns it."""
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    compiled._init_handles()


def run_case(name: str) -> None:
    began_s = time.monotonic()
    notes = CASES[name]()
    notes.run()
    noted_s = time.monotonic() - began_s
    count = compile_launches([launch for _, launch in notes.launches.values()], THREADS)
    compiled_s = time.monotonic() - began_s - noted_s
    print(f"{name}: {count} kernels, {noted_s:.1f} s to note and {compiled_s:.1f} s to compile", flush=True)


def run_cases(names: list[str]) -> list[str]:
    """Runs each case in its own process, all at once; returns those that failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = {name: subprocess.Popen([sys.executable, __file__, "--case", name], env=environment) for name in names}
    ends_s, failed = time.monotonic() + MOST_S, []
    for name, child in children.items():
        try:
            if child.wait(max(0.0, ends_s - time.monotonic())):
                failed.append(name)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable; default all, side by side")
    names = parser.parse_args().case or list(CASES)
    if len(names) == 1:
        run_case(names[0])
    elif failed := run_cases(names):
        raise SystemExit(f"not compiled: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
