"""The cost of the boundary between core and workers: the ring alone, a step through it, and a worker's memory.

    python benchmarks/ring.py [--out FILE.json]

Latencies are one way, from the writer's clock to the reader's (the same clock: CLOCK_MONOTONIC), with a message of a
decode step's size. `paced` leaves a millisecond between messages, so that readers have gone to sleep, as in the longer
steps of a model. `at once` sends the next message when the last was answered, so that readers still spin. `bare` is
`paced` in C with only the futex calls (ring_limit.c), if there is a C compiler: the kernel's part. A step through
multiproc is paired with the same step in this process, in alternating blocks; the budget applies to the difference.
Expected on two cores: below 20 us one way, below 150 us a step, below 300 MB a worker.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import psutil
from multiproc_parts import HERE, bring_up, options
from null_rank import NullRank
from plan_maker import PlanMaker
from report import write_report

from headrace.executor.placement.base import Executor
from headrace.executor.placement.multiproc import MultiprocExecutor
from headrace.ipc.transport.ring import RingLayout, RingReader, RingWriter, lay_out_ring
from headrace.ipc.wait import Deadline

MESSAGE_BYTES = 1000
"""About the size of a decode step of 64 rows."""
NUM_MESSAGES, PACE_S = 2000, 1e-3
ROWS, BLOCKS, STEPS = 64, 20, 50
BUDGET_LATENCY_US, BUDGET_STEP_US, BUDGET_WORKER_MB = 20.0, 150.0, 300.0

READER = """
import os, sys, time
from headrace.ipc.transport.ring import RingLayout, RingReader, RingWriter
from headrace.ipc.wait import Deadline
there, back, reader, count = map(int, sys.argv[1:5])
ring = RingReader(there, RingLayout(*map(int, sys.argv[5:8])), reader)
answers = RingWriter(back, RingLayout(*map(int, sys.argv[8:11]))) if reader == 0 else None
forever, late_ns = Deadline(None), []
for _ in range(count):
    _, data = ring.take(forever)
    late_ns.append(time.monotonic_ns() - int.from_bytes(data[:8], "little"))
    ring.finished()
    if answers is not None:
        answers.put(b"", forever)
print(*late_ns)
"""


def latency_us(num_readers: int, pace_s: float) -> list[float]:
    """One-way latencies to the first reader, which is the one that answers."""
    layouts = RingLayout.holding(MESSAGE_BYTES, 4, num_readers), RingLayout.holding(64, 4, 1)
    fds = [os.memfd_create(name) for name in ("there", "back")]
    for fd, layout in zip(fds, layouts, strict=True):
        lay_out_ring(fd, layout)
    shapes = [str(n) for layout in layouts for n in (layout.num_slots, layout.slot_bytes, layout.num_readers)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *map(str, fds), str(reader), str(NUM_MESSAGES), *shapes],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
        )
        for reader in range(num_readers)
    ]
    writer, answers, deadline = RingWriter(fds[0], layouts[0]), RingReader(fds[1], layouts[1], 0), Deadline(30.0)
    filler = bytes(MESSAGE_BYTES - 8)
    for _ in range(NUM_MESSAGES):
        if pace_s:
            time.sleep(pace_s)
        writer.put(time.monotonic_ns().to_bytes(8, "little") + filler, deadline)
        answers.take(deadline)
    heard = [process.communicate(timeout=30)[0] for process in readers]
    for fd in fds:
        os.close(fd)
    return [int(ns) / 1e3 for ns in heard[0].split()][NUM_MESSAGES // 10 :]


def bare_latency_us(num_readers: int) -> list[float]:
    """The same without Python and without a ring: the cost of waking processes. Empty without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ring_limit"
        source = Path(__file__).with_name("ring_limit.c")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        asked = [str(program), str(num_readers), str(NUM_MESSAGES), str(round(1e6 * PACE_S))]
        heard = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    return [int(ns) / 1e3 for ns in heard.split()][NUM_MESSAGES // 10 :]


class Stepper:
    """Runs decode steps of ROWS rows through one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._maker = executor, PlanMaker(block_size=16)
        for row in range(ROWS):
            self._maker.enter(row, [5 + row] * 4)
        self._number = 0
        self.microseconds(prompts=True)

    def microseconds(self, prompts: bool = False) -> float:
        for row in range(ROWS):
            self._maker.compute(row)
        plan = self._maker.plan()
        began_s = time.perf_counter()
        self._executor.submit(plan)
        result = self._executor.collect()
        took_us = 1e6 * (time.perf_counter() - began_s)
        assert len(result.token_ids) == ROWS
        for row in range(ROWS):
            self._maker.tokens[row].append(0)
        return took_us


@contextmanager
def null_executors() -> Iterator[tuple[Stepper, Stepper]]:
    """The same null model in this process, and in two workers."""
    asked = options(2)
    asked = type(asked)(**{**{name: getattr(asked, name) for name in asked.__struct_fields__}, "max_num_seqs": ROWS})
    here: Any = NullRank(asked)  # a rank alone is an executor too, as far as a stepper asks
    there = MultiprocExecutor(asked)
    try:
        bring_up(here, asked)
        bring_up(there, asked)
        yield Stepper(here), Stepper(there)
    finally:
        there.stop()


def step_costs() -> dict[str, Any]:
    raw: dict[str, list[float]] = {"uni": [], "mp": []}
    with null_executors() as (here, there):
        for _ in range(BLOCKS):
            for name, stepper in (("uni", here), ("mp", there)):
                raw[name] += [stepper.microseconds() for _ in range(STEPS)]
    pairs = [b - a for a, b in zip(raw["uni"], raw["mp"], strict=True)]
    return {
        **{f"{name}_p50_us": statistics.median(values) for name, values in raw.items()},
        "difference_p50_us": statistics.median(pairs),
        "budget_us": BUDGET_STEP_US,
        "raw_us": raw,
    }


def worker_memory() -> dict[str, Any]:
    """Memory of each of two workers whose model is so small that only the process counts."""
    import tiny_models

    from headrace.core.options.engine_options import Options

    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save("llama", Path(folder))
        asked = Options(
            model=folder,
            dtype="float32",
            tensor_parallel_size=2,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=64,
            max_model_len=256,
            max_num_seqs=8,
        )
        executor = MultiprocExecutor(asked)
        try:
            plan, facts = bring_up(executor, asked)
            maker = PlanMaker(block_size=plan.block_size)
            maker.enter(0, [5, 6, 7])
            maker.compute(0)
            executor.submit(maker.plan())
            executor.collect()
            held_bytes = (facts.memory.weights_bytes + facts.kv_cache_bytes) // 2
            info = [psutil.Process(child.pid).memory_full_info() for child in executor._group.children]
        finally:
            executor.stop()
    return {
        "resident_mb": [(each.rss - held_bytes) / 1e6 for each in info],
        "proportional_mb": [(each.pss - held_bytes) / 1e6 for each in info],
        "budget_mb": BUDGET_WORKER_MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))  # for the workers
    results: dict[str, Any] = {"latency": {"budget_p50_us": BUDGET_LATENCY_US}}
    for num_readers in (1, 2):
        for name, pace_s in (("paced", PACE_S), ("at once", 0.0), ("bare", None)):
            samples = bare_latency_us(num_readers) if pace_s is None else latency_us(num_readers, pace_s)
            if not samples:
                continue
            p50, p99 = statistics.median(samples), statistics.quantiles(samples, n=100)[98]
            print(f"ring, {num_readers} readers, {name}: one way p50 {p50:.1f} us, p99 {p99:.1f} us")
            results["latency"][f"{num_readers} readers, {name}"] = {"p50_us": p50, "p99_us": p99, "raw_us": samples}
    results["step"] = step = step_costs()
    print(
        f"a step of {ROWS} rows: {step['uni_p50_us']:.0f} us here, {step['mp_p50_us']:.0f} us through two workers; "
        f"p50 of the difference {step['difference_p50_us']:.0f} us"
    )
    results["worker memory"] = memory = worker_memory()
    print("a worker beyond weights and cache: " + ", ".join(f"{mb:.0f} MB" for mb in memory["resident_mb"]))
    if arguments.out:
        write_report(arguments.out, "ring", results)


if __name__ == "__main__":
    main()
