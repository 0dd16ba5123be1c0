"""The environment in which vLLM is fastest on a CPU, for the benchmarks that measure it beside Headrace."""

from __future__ import annotations

import os
from pathlib import Path


def settings(venv: Path) -> dict[str, str]:
    """Variables beside those of this process: all cores, Intel's OpenMP where `venv` has it, nothing from a network."""
    preload = next(iter(sorted(venv.rglob("libiomp5.so"))), None)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({} if preload is None else {"LD_PRELOAD": str(preload)}),
    }
