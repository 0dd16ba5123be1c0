"""Shared by the GPU benchmarks: models by shape, the machine's limits, and an executor driven without a core.

Each benchmark takes `--device cuda` (the default) or `--dry`, which runs a tiny model on the CPU to test the script.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_ledger import LAUNCH_S, Rates, phase_of
from gpu_shapes import MODELS
from gpu_table import DRY_RUN
from report import Report
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import fit_cache
from headrace.core.options.resolve import resolve
from headrace.executor.gpu.collectives import GpuCollectives
from headrace.executor.gpu.device_state import Device, HostDevice
from headrace.executor.gpu.hardware.cuda import CudaCapturer, CudaDevice
from headrace.executor.gpu.hardware.device import GpuFacts, choose_device, gpu_facts
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.parallel.rank_place import SINGLE
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement.make_rank import make_rank
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.process.host import host_memory
from headrace.ipc.step import NewRow, StepPlan, StepResult

BLOCK_SIZE = 16


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=gpu_name, default="cuda", help="cuda or cuda:INDEX")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, to see that the script works")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser


def gpu_name(text: str) -> str:
    if re.fullmatch(r"cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no GPU's name; cuda and cuda:INDEX are")
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def check_only(parser: argparse.ArgumentParser, only: str, names: Iterable[str]) -> None:
    """Exits with 2 if no name contains the requested text."""
    known = list(dict.fromkeys(names))
    if not any(only in name for name in known):
        parser.error(f"--only {only!r} is in no name that there is: {'; '.join(known)}")


def open_report(arguments: argparse.Namespace, name: str, results: dict[str, Any]) -> Report:
    """A report that records whether the run is a dry one."""
    return Report(arguments.out, name, {"dry": arguments.dry, **results})


class Refused(Exception):
    """A library that a case compares with does not support the case's shape: there is no figure, and nothing failed."""


def attempt(report: Report, case: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds a case's figures to the report, or why there are none: one case that fails does not affect the others."""
    try:
        found = {**case, **measure()}
    except Refused as error:
        found = {**case, "refused": str(error)}
        print(f"{case} refused: {error}", flush=True)
    except Exception as error:
        traceback.print_exc()
        found = {**case, "failed": f"{type(error).__name__}: {error}"[:2000]}
        print(f"{case} failed: {found['failed'][:300]}", flush=True)
    report.add_case(found)
    return found


def finish(report: Report) -> None:
    """Marks a dry run, and exits with 1 if a case failed, after all are in the report."""
    if report.results["dry"]:
        print(DRY_RUN, flush=True)
    if failed := [case for case in report.results["cases"] if "failed" in case]:
        raise SystemExit(f"{len(failed)} of {len(report.results['cases'])} cases failed")


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """A folder with the config of a model; the weights are random (load_format dummy)."""
    with tempfile.TemporaryDirectory(prefix="headrace-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        yield Path(folder)


# The machine's limits:


def device_of(dry: bool, asked: str) -> torch.device:
    """Raises SystemExit with a message if the GPU is not available."""
    if dry:
        return torch.device("cpu")
    try:
        return choose_device(asked)
    except OptionError as error:
        raise SystemExit(f"{error}; --dry tries the benchmarks with a tiny model on the CPU") from None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_s(device: torch.device, run: Callable[[], Any], count: int, warm_up: int = 3) -> list[float]:
    """Seconds of each of `count` consecutive runs, by the device's own clock."""
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        samples = []
        for _ in range(count):
            began_s = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began_s)
        return samples
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]


def limits(device: torch.device, dry: bool) -> dict[str, Any]:
    """Measures the machine's current limits on random data: copying (bytes read and written), bf16 and fp8 products,
    and kernels of a graph that do nothing."""
    elements, side = (1 << 20, 256) if dry else (1 << 32, 8192)
    source = torch.empty(elements, dtype=torch.uint8, device=device).random_(0, 255)
    into = torch.empty_like(source)
    copies_s = times_s(device, partial(into.copy_, source), 10)
    del source, into
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    samples = {"copies_s": copies_s, "products_s": times_s(device, partial(torch.matmul, a, b), 10)}
    if device.type == "cuda":
        for name, find in (("launches_s", launches_s), ("fp8_products_s", partial(fp8_products_s, a=a, b=b))):
            try:
                samples[name] = find(device)
            except RuntimeError as error:  # a refinement must not cost the other figures
                print(f"no {name}: {error}")
    del a, b
    if device.type == "cuda":
        torch.cuda.empty_cache()  # so that an engine in another process can use it
    median_s = {name: statistics.median(each) for name, each in samples.items()}
    return {
        "device": gpu_facts(device).name if device.type == "cuda" else "cpu (dry run)",
        "copy_bytes_s": 2 * elements / median_s["copies_s"],
        "bf16_flop_s": 2 * side**3 / median_s["products_s"],
        "fp8_flop_s": 2 * side**3 / median_s["fp8_products_s"] if "fp8_products_s" in median_s else None,
        "launch_s": median_s.get("launches_s", LAUNCH_S),
        **samples,
    }


def fp8_products_s(device: torch.device, a: Tensor, b: Tensor) -> list[float]:
    """Seconds of a b^T [side, side] with a scale per row of both, as the engine multiplies."""
    ones, codes = torch.ones(len(a), device=device), [x.to(torch.float8_e4m3fn) for x in (a, b)]
    of: dict[str, Any] = {"scale_a": ones[:, None], "scale_b": ones[None], "out_dtype": torch.bfloat16}
    return times_s(device, partial(torch._scaled_mm, codes[0], codes[1].t(), **of), 10)


def rates_of(found: dict[str, Any]) -> Rates:
    """The rates from the result of `limits`. fp8 products are compared with bf16's rate, as the target is defined."""
    return Rates(found["copy_bytes_s"], found["bf16_flop_s"], found["launch_s"])


def launches_s(device: torch.device, count: int = 200) -> list[float]:
    """Seconds per kernel of a graph of nearly empty kernels."""
    word = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(count):
            word.add_(1)

    with torch.inference_mode():
        replay, _ = CudaCapturer(device).capture(run)
    return [sample / count for sample in times_s(device, replay, 10)]


def profile_us(device: torch.device, run: Callable[[], Any], count: int) -> dict[str, float]:
    """Device microseconds of one of `count` runs by the phases of `gpu_ledger`, by torch's profiler; may be empty."""
    if device.type != "cuda":
        return {}
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                run()
            synchronize(device)
    except (RuntimeError, AssertionError) as error:  # some machines do not permit CUPTI
        print(f"no profile: {error}")
        return {}
    found: dict[str, float] = {}
    for event in profile.key_averages():
        phase = phase_of(event.key)
        found[phase] = found.get(phase, 0.0) + event.self_device_time_total / count
    return found


# An executor driven without a core:


class DryBackend:
    """The CPU in place of a GPU."""

    device = torch.device("cpu")

    def facts(self) -> GpuFacts:
        free_bytes, total_bytes = self.memory()
        return GpuFacts("cpu (dry run)", (9, 0), total_bytes, free_bytes)

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def host_side(self) -> HostDevice:
        return HostDevice()

    def capturer(self) -> None:
        return None

    def meter(self) -> DryBackend:
        return self

    def side_stream(self) -> DryBackend:
        return self

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        for into, source in pairs:
            into.copy_(source)
        return lambda: None

    def link(self, meeting: Rendezvous, options: Options) -> GpuCollectives:
        raise NotImplementedError("a dry run has one rank")

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        run()
        return 1 << 20

    def memory(self) -> tuple[int, int]:
        memory = host_memory()
        return memory.available_bytes, memory.total_bytes


def blocks_for(contexts: Sequence[int]) -> int:
    """Number of cache blocks for rows of so many tokens each."""
    return sum(-(-context // BLOCK_SIZE) for context in contexts) + 2


class Feeder:
    """Rows of random tokens, with plans like the core's, for an executor in this process."""

    def __init__(self, model: Path, *, dry: bool, device: str, max_num_seqs: int, context: int, **options: Any) -> None:
        settings = {"num_gpu_blocks_override": blocks_for([context] * max_num_seqs), **options}
        asked = Options(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu" if dry else device,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=context,
            **settings,
        )
        made = GpuRank(asked, DryBackend.device, DryBackend()) if dry else make_rank(asked, SINGLE)
        assert isinstance(made, GpuRank), f"{device} is no GPU"
        self.executor = made
        plan = resolve(asked, made.describe(lambda phase: None))
        self.reading = made.load(plan, lambda phase: None)
        facts = fit_cache(plan, self.reading)
        made.allocate(facts.num_blocks, facts.max_model_len)
        self.device = torch.device(made.steps.state.words.device)
        self.device_side: Device = HostDevice() if dry else CudaDevice(self.device)
        self.plan, self._step, self._next_block = plan, 0, 0
        # Block 0 is the null block; the others are in random order, as after hours of service.
        self._blocks = 1 + np.random.default_rng(0).permutation(facts.num_blocks - 1)
        self._lengths: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._released: list[int] = []
        self._num_in_flight = 0

    def capture(self) -> float:
        """Captures all graphs now; returns the seconds."""
        began_s = time.perf_counter()
        while self.executor.idle():
            pass
        synchronize(self.device)
        return time.perf_counter() - began_s

    def enter(self, prompts: Sequence[int], temperature: float = 0.0) -> None:
        """Computes prompts of so many tokens: as many whole ones per step as fit its budget, long ones in chunks."""
        dice = np.random.default_rng(len(prompts))
        waiting = list(range(len(prompts)))
        while waiting:
            budget, new, rows, counts, starts = self.plan.max_num_batched_tokens, [], [], [], []
            while waiting and budget:
                row, prompt_tokens = waiting[0], prompts[waiting[0]]
                if row not in self._lengths:
                    self._lengths[row] = 0
                    self._num_blocks[row] = -(-(prompt_tokens + 1) // BLOCK_SIZE)
                    tokens = dice.integers(2, self.plan.model.vocab_size, prompt_tokens).astype(np.int32)
                    new.append(self._new_row(row, tokens, temperature))
                count = min(prompt_tokens - self._lengths[row], budget)
                rows.append(row)
                counts.append(count)
                starts.append(self._lengths[row])
                self._lengths[row] += count
                budget -= count
                if self._lengths[row] == prompt_tokens:
                    waiting.pop(0)
            self._submit(rows, counts, starts, [prompts[row] for row in rows], new)
            self.collect()

    def decode(self) -> None:
        """Starts a step of one token for each row."""
        rows = list(self._lengths)
        starts = [self._lengths[row] for row in rows]
        for row in rows:
            self._lengths[row] += 1
        self._submit(rows, [1] * len(rows), starts, [0] * len(rows), [])

    def release(self) -> None:
        """Releases all rows; the next plan includes that."""
        while self._num_in_flight:
            self.collect()
        self._released = list(self._lengths)
        self._lengths, self._num_blocks, self._next_block = {}, {}, 0

    def _submit(
        self, rows: list[int], counts: list[int], starts: list[int], sampled_from: list[int], new: list[NewRow]
    ) -> None:
        """Rows that reach their `sampled_from` tokens are sampled; a row that outgrows its blocks gets one more."""
        appended = []
        for row in rows:
            if self._lengths[row] > self._num_blocks[row] * BLOCK_SIZE:
                self._num_blocks[row] += 1
                appended.append((row, self._take(1)[0]))
        i32 = np.int32
        plan = StepPlan(
            step=self._step,
            released_rows=np.array(self._released, i32),
            new_rows=tuple(new),
            block_tables=np.array([row for row, _ in appended], i32),
            block_ids=np.array([block for _, block in appended], i32),
            rows=np.array(rows, i32),
            num_tokens=np.array(counts, i32),
            num_computed_tokens=np.array(starts, i32),
            sampled=np.array(starts) + np.array(counts) >= np.array(sampled_from),
            total_tokens=sum(counts),
        )
        self._step += 1
        self._released = []
        self.executor.submit(plan)
        self._num_in_flight += 1

    def collect(self) -> StepResult:
        self._num_in_flight -= 1
        result = self.executor.collect()
        assert not result.failures, result.failures[0].failure.message
        return result

    def _take(self, count: int) -> list[int]:
        self._next_block += count
        return self._blocks[self._next_block - count : self._next_block].tolist()

    def _new_row(self, row: int, tokens: np.ndarray, temperature: float) -> NewRow:
        return NewRow(
            row=row,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            block_ids=np.array(self._take(self._num_blocks[row]), np.int32),
            task=Generate(sampling=Sampling(max_tokens=1 << 20, temperature=temperature, ignore_eos=True)),
            seed=row,
        )

    def close(self) -> None:
        self.executor.stop()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
