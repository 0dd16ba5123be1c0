"""Starts and ends an engine with two workers again and again, and looks for leaks.

    python benchmarks/cycles.py [--cycles 100]

The engine computes nothing (`tests/support/null_rank.py`). It is ended in turn by closing it, by killing a core, by
killing a worker, and while it loads. After each cycle no process, socket or file in shared memory may be left;
descriptors, threads and resident memory of the process that starts the engines are compared with those halfway through.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from report import write_report

from headrace import LLM, HeadraceError, SamplingParams

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cycles.json"
ENDS = ("close", "kill the core", "kill a worker", "fail while loading")
LONG = SamplingParams(max_tokens=20_000, ignore_eos=True)
GONE_WITHIN_S = 5.0


def options(end: str) -> dict[str, Any]:
    told: dict[str, Any] = {"step_delay_s": 0.001}
    if end == "fail while loading":
        told |= {"rank": 1, "phase": "load", "how": "sigkill"}
    return {
        "tensor_parallel_size": 2,
        "worker_cls": "null_rank:NullRank",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "hf_overrides": told,
    }


def cycle(end: str) -> None:
    """One engine from start to end. Raises AssertionError for unexpected behaviour."""
    if end == "fail while loading":
        with contextlib.suppress(HeadraceError):
            LLM("null", **options(end)).close()
            raise AssertionError("the engine started, and should not have")
        return
    with LLM("null", **options(end)) as llm:
        next(llm.stream([5, 6, 7], LONG))
        if end == "close":
            return
        core = psutil.Process(llm.engine.pid)
        victim = core if end == "kill the core" else core.children()[0]
        stream = llm.stream([5, 6, 7], LONG)
        next(stream)
        victim.send_signal(signal.SIGKILL)
        with contextlib.suppress(HeadraceError):
            list(stream)
            raise AssertionError(f"the stream went on after: {end}")


def resources(runtime_directory: Path) -> dict[str, int]:
    """The resources of this process, and anything that engines have left behind."""
    this = psutil.Process()
    _, alive = psutil.wait_procs(this.children(recursive=True), timeout=GONE_WITHIN_S)
    return {
        "processes": len(alive),
        "sockets": len(list(runtime_directory.iterdir())),
        "shared_memory_files": len([name for name in os.listdir("/dev/shm") if "headrace" in name]),
        "descriptors": this.num_fds(),
        "threads": this.num_threads(),
        "rss_bytes": this.memory_info().rss,
    }


def run(cycles: int, runtime_directory: Path) -> dict[str, Any]:
    samples: list[dict[str, Any]] = []
    for number in range(cycles):
        end = ENDS[number % len(ENDS)]
        began_s = time.monotonic()
        cycle(end)
        samples.append({"end": end, "seconds": time.monotonic() - began_s, **resources(runtime_directory)})
    half, last = samples[cycles // 2 - 1], samples[-1]
    growth = {name: last[name] - half[name] for name in ("descriptors", "threads", "rss_bytes")}
    left = {name: max(sample[name] for sample in samples) for name in ("processes", "sockets", "shared_memory_files")}
    return {"cycles": cycles, "left_over": left, "growth_of_last_half": growth, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "tests" / "support")
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, open(os.devnull, "w") as nowhere:
        os.environ["HEADRACE_RUNTIME_DIR"] = folder
        with contextlib.redirect_stderr(nowhere):  # discards the reports of deaths
            results = run(arguments.cycles, Path(folder))
    write_report(arguments.out, "cycles", results)
    print(f"{arguments.cycles} cycles: left over {results['left_over']}, grown {results['growth_of_last_half']}")
    sys.exit(any(results["left_over"].values()))


if __name__ == "__main__":
    main()
