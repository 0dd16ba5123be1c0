"""Loads two checkpoints and prints the peak memory of loading the second: `python load_memory.py SMALL LARGE`.

The first has the same format, so that imports and builds do not count for the second.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import torch

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.families import spec_from_config
from headrace.kernels.cpu.linear.linear import runtime


def load(path: str) -> CpuDecoder:
    checkpoint = open_checkpoint(Options(model=path))
    spec, limits = spec_from_config(checkpoint.config), StepLimits(64, 4, 512, 0)
    used = runtime(num_threads=1)
    return CpuDecoder(spec, checkpoint.weights(), torch.float16, limits, keep_packed=True, used=used)


def resident_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def main(small: str, large: str) -> None:
    load(small)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    before = resident_bytes("VmRSS")
    decoder = load(large)
    print(json.dumps({"weights": decoder.weight_bytes, "peak": resident_bytes("VmHWM") - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
