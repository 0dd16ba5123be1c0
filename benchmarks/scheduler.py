"""Python's cost of one step of the core, with an executor that computes nothing.

    python benchmarks/scheduler.py [--out FILE.json]

Counts everything in an iteration of the loop except the executor's own calls: receiving messages, scheduling,
advancing, and making each client's message. The budget (design, section 5) is 100 us + 1.5 us per running request. With
two steps in flight (asynchronous scheduling) the same work also reconciles what was planned ahead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from engine_parts import VOCAB_SIZE, SteppedCore
from report import write_report

from headrace.executor.testing.null import NullExecutor, NullModel

RUNNING = (1, 32, 256, 1024)
STEPS = 400
PROMPT_TOKENS = 64
BUDGET_BASE_US, BUDGET_PER_REQUEST_US = 100.0, 1.5


class TwoStepsNull(NullExecutor):
    max_steps_in_flight = 2
    async_by_default = True


class TimedExecutor:
    """Passes calls on and adds up the seconds they took."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: Any) -> None:
        began = time.perf_counter()
        self._inner.submit(plan)
        self.seconds += time.perf_counter() - began

    def collect(self) -> Any:
        began = time.perf_counter()
        result = self._inner.collect()
        self.seconds += time.perf_counter() - began
        return result


def measure(num_running: int, executor_class: type[NullExecutor]) -> list[float]:
    """Microseconds of each of STEPS decode steps."""
    core = SteppedCore(
        NullModel(vocab_size=VOCAB_SIZE),
        executor_class=executor_class,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        block_size=16,
        max_model_len=2048,
        num_blocks=1024 * 40,
    )
    executor = TimedExecutor(core.loop._executor)
    core.loop._executor = executor
    client = core.open()
    for slot in range(num_running):
        client.add(slot, [slot % 97] * PROMPT_TOKENS, max_tokens=STEPS + 200, ignore_eos=True)
    while core.loop.scheduler.num_running < num_running or len(client.tokens()) < num_running:
        core.loop.turn()
    samples = []
    for _ in range(STEPS):
        client.heard.clear()
        executor.seconds = 0.0
        began = time.perf_counter()
        core.loop.turn()
        samples.append(1e6 * (time.perf_counter() - began - executor.seconds))
    assert core.loop.scheduler.num_running == num_running
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    print(f"{'in flight':>9} {'running':>8} {'p50 us':>9} {'p99 us':>9} {'mean us':>9} {'budget us':>10}")
    for executor_class in (NullExecutor, TwoStepsNull):
        in_flight = executor_class.max_steps_in_flight
        for num_running in RUNNING:
            samples = measure(num_running, executor_class)
            p50, p99 = statistics.median(samples), statistics.quantiles(samples, n=100)[98]
            mean = statistics.fmean(samples)
            budget = BUDGET_BASE_US + BUDGET_PER_REQUEST_US * num_running
            print(f"{in_flight:>9} {num_running:>8} {p50:>9.1f} {p99:>9.1f} {mean:>9.1f} {budget:>10.1f}")
            name = str(num_running) if in_flight == 1 else f"{num_running}, {in_flight} in flight"
            figures = {"p50_us": p50, "p99_us": p99, "mean_us": mean, "budget_us": budget}
            rows[name] = {**figures, "raw_us": samples}
    if arguments.out:
        write_report(arguments.out, "scheduler", rows)


if __name__ == "__main__":
    main()
