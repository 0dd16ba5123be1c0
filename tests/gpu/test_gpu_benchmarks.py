"""The GPU's benchmarks without one: the account on paper, how gaps are taken, and that a bad case costs no other."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.executor.gpu.graphs import DecodeGraphs
from headrace.executor.gpu.sampler import StepEnding
from headrace.kernels import choose_reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="load")
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


# --- on paper ---------------------------------------------------------------------------------------------------


def test_a_decode_reads_the_weights_and_the_cache_of_llama(load: Any) -> None:
    ledger, shapes = load("gpu_ledger"), load("gpu_shapes")
    elements, head = shapes.weight_elements(shapes.LLAMA_8B)
    norms = 65 * 4096
    assert elements + 2 * head + norms == 8_030_261_248, "Llama-3.1-8B's parameters"
    assert shapes.cache_bytes(shapes.LLAMA_8B, 1) == 128 << 10
    rates = ledger.Rates(1e12, 1e15)
    seconds, bound_by = ledger.limit(shapes.LLAMA_8B, ledger.Step(32, 1024), rates)
    assert bound_by == "bandwidth"
    assert seconds == pytest.approx((2 * (elements + head) + 32 * 1024 * (128 << 10)) / 1e12)
    seconds, bound_by = ledger.limit(shapes.LLAMA_8B, ledger.Step(1, 8192, 8192), rates)
    assert bound_by == "compute"
    attention = 4 * 32 * 32 * 128 * 8192 * 8193 // 2
    assert seconds == pytest.approx((2 * 8192 * elements + 2 * head + attention) / 1e15)


def test_no_step_is_predicted_below_its_limit(load: Any) -> None:
    ledger, shapes = load("gpu_ledger"), load("gpu_shapes")
    rates = ledger.Rates(4.3e12, 788e12, 0.0)
    for config in (shapes.LLAMA_8B, shapes.QWEN3_06B):
        for step in (ledger.Step(1, 1024), ledger.Step(256, 1024, weight_bytes=1), ledger.Step(2, 700, 500)):
            total_s = sum(phase.predicted_s(rates) for phase in ledger.phases(config, step))
            least_s, _ = ledger.limit(config, step, rates)
            assert least_s < total_s < 2 * least_s


def test_every_kernel_of_ours_in_a_step_has_a_phase_of_its_own(load: Any) -> None:
    """By the names that a profile shows, which are those of the functions."""
    ledger = load("gpu_ledger")
    folder = ROOT / "kernels" / "triton"
    sources = "".join(file.read_text() for file in folder.glob("*.py"))
    for name in (
        "attend",
        "combine",
        "norm",
        "rotary_cache",
        "chunk",
        "pick",
        "round_tokens",
        "linear",
        "small_linear",
    ):
        assert f"def {name}_kernel(" in sources
        assert ledger.phase_of(f"{name}_kernel") != "inputs, embedding"
    assert ledger.phase_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "matrices"
    assert ledger.phase_of("void at::native::vectorized_elementwise_kernel<4, ...>") == "inputs, embedding"


# --- gaps -------------------------------------------------------------------------------------------------------


class Clock:
    """Marks of a device whose clock is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> Any:
        return ClockMark(self)


class ClockMark:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.at_s = clock, 0.0

    def record(self) -> None:
        self.at_s = self._clock.now_s

    def seconds_since(self, earlier: ClockMark) -> float:
        return self.at_s - earlier.at_s


def test_a_gap_is_from_the_end_of_a_graph_to_the_begin_of_the_next(load: Any) -> None:
    decode, clock, replayed = load("gpu_decode"), Clock(), []

    class Capturer:
        pool_bytes = 0

        def capture(self, run: Any) -> tuple[Any, Any]:
            def replay() -> None:
                clock.now_s += 0.010
                replayed.append(clock.now_s)

            return replay, None

        def forget(self) -> None:
            raise AssertionError

    graphs = DecodeGraphs((4, 64), Capturer(), lambda key: None)
    while graphs.capture_next():
        pass
    untimed = graphs.find(64, StepEnding.ARGMAX)
    assert untimed is not None
    with decode.timed_replays(graphs, 64, clock.mark) as marks:
        for step in range(decode.WARM_UP + 4):
            graphs.find(64, StepEnding.ARGMAX).replay()
            clock.now_s += 0.001 * (step + 1)
    assert len(replayed) == decode.WARM_UP + 4
    assert graphs.find(64, StepEnding.ARGMAX) is untimed
    graph_s, gaps_s = decode.between(marks)
    assert graph_s == pytest.approx([0.010] * 4)
    assert gaps_s == pytest.approx([0.001 * (decode.WARM_UP + 1 + number) for number in range(3)])


# --- scripts ----------------------------------------------------------------------------------------------------


def test_decoding_runs_dry_and_its_report_is_whole(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, out = load("gpu_decode"), tmp_path / "gpu_decode.json"
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", "--dry", "--weights", "bf16", "--out", str(out)])
    decode.main()
    report = json.loads(out.read_text())
    one, four = report["results"]["cases"]
    assert (one["batch"], four["batch"], one["context"]) == (1, 4, 64)
    for case in (one, four):
        assert len(case["samples_s"]) == 12
        assert case["share_of_limit"] == pytest.approx(case["limit_us"] / case["step_us"])
    output = capsys.readouterr().out
    assert "matrices" in output
    assert output.splitlines()[-1] == load("gpu_table").DRY_RUN
    assert report["results"]["dry"]
    table = load("gpu_table")
    assert table.table(tmp_path) == table.NO_FIGURES, "a dry run is no measurement"


def test_nothing_is_timed_after_the_first_profile_of_a_process(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a profile turns on stays on, and launches take longer with it."""
    decode, done = load("gpu_decode"), list[tuple[str, str]]()

    def measured(folder: Path, arguments: Any, report: Any, weights: str) -> None:
        done.append(("timed", weights))
        report.add_case({"weights": weights, "batch": 1})

    def profiled(folder: Path, arguments: Any, report: Any, weights: str) -> None:
        done.append(("profiled", weights))
        raise RuntimeError("CUPTI is not let in")

    monkeypatch.setattr(decode.gpu_common, "device_of", lambda dry, asked: decode.gpu_common.torch.device("cuda", 0))
    monkeypatch.setattr(decode, "limits", lambda device, dry: {})
    monkeypatch.setattr(decode, "measure_all", measured)
    monkeypatch.setattr(decode, "profile_all", profiled)
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", "--out", str(tmp_path / "gpu_decode.json")])
    decode.main()
    assert done == [("timed", "bf16"), ("timed", "fp8"), ("profiled", "bf16"), ("profiled", "fp8")]


PRETEND = """
import sys
sys.path[:0] = sys.argv.pop(1).split(":")
from pretend_kernels import begin
begin()
import torch
from pretend_cuda import DEVICE
import gpu_common, gpu_decode
from headrace.executor.gpu.rank import GpuRank
gpu_common.device_of = lambda dry, asked: DEVICE
gpu_common.make_rank = lambda asked, place: GpuRank(asked, DEVICE, place=place)
gpu_decode.limits = lambda device, dry: gpu_common.limits(device, True)  # small ones
with torch.cuda.device(DEVICE):
    gpu_decode.main()
"""


@pytest.mark.system
def test_decoding_is_measured_through_graphs_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """What a dry run has no use for: limits with launches and fp8, captures, marks between graphs; one row is long."""
    out = tmp_path / "gpu_decode.json"
    paths = f"{ROOT / 'tests' / 'support'}:{ROOT / 'benchmarks'}"
    asked = (
        "--model",
        "tiny",
        "--batch",
        "2",
        "--context",
        "24",
        "--beside",
        "70",
        "--steps",
        "4",
        "--weights",
        "bf16",
        "--out",
        str(out),
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRETEND, paths, *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    (case,) = results["cases"]
    assert "failed" not in case
    assert (case["batch"], case["context"], case["beside"]) == (3, 24, 70)
    assert case["why_eager"] == ""
    assert "matrices" in "".join(case["account"])
    assert len(case["graph_samples_s"]) == 5, "a replay for each step after the warm-up"
    assert len(case["gap_samples_s"]) == 4
    assert min(case["gap_samples_s"]) > 0
    assert results["limits"]["fp8_flop_s"] > 0
    assert len(results["limits"]["launches_s"]) == 10


def test_every_kernel_that_is_timed_is_called_as_its_reference_is(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, shapes = load("gpu_kernels"), load("gpu_shapes")

    monkeypatch.setattr(kernels.Machine, "choose", lambda _, op, *args, **facts: choose_reference(op))
    machine = kernels.Machine(torch.device("cpu"), {}, True)
    names, shown = set(), set()
    for kernel in kernels.kernels_of(machine, shapes.TINY):
        kernel.make()()
        assert kernel.num_bytes > 0
        names.add(kernel.name)
        shown.add(kernel.shape)
    assert {"linear gate up fp8", "attention, fp8 cache", "choice, drawn", "rotary, cache write"} <= names
    assert "attention, torch math" in names
    assert "3 x 1 of 40 + 1 x 1 of 80" in shown
    tiles = [case["tiles"] for case, _ in kernels.sweep(machine, shapes.TINY)]
    assert tiles.count(None) == 2


def test_a_backend_of_torch_that_refuses_a_shape_is_no_failure_of_the_job(load: Any) -> None:
    common, kernels, shapes = load("gpu_common"), load("gpu_kernels"), load("gpu_shapes")
    machine = kernels.Machine(torch.device("cpu"), {}, True)
    report = SimpleNamespace(results={"dry": False, "cases": []})
    report.add_case = report.results["cases"].append
    cudnn = kernels.library_attention(machine, shapes.TINY, 8, kernels.SDPBackend.CUDNN_ATTENTION)  # a CPU has none
    common.attempt(report, {"kernel": cudnn.name}, cudnn.make)
    (case,) = report.results["cases"]
    assert case["refused"].startswith("torch has no CUDNN_ATTENTION for")
    common.finish(report)
    common.attempt(report, {"kernel": "another"}, lambda: 1 / 0)
    with pytest.raises(SystemExit, match="1 of 2 cases failed"):
        common.finish(report)


def test_a_full_load_is_as_large_as_the_cache_holds_to_its_end(load: Any) -> None:
    fit = load("gpu_serving").seqs_that_fit
    token_bytes = 2 * 32 * 8 * (128 + 4)  # with a scale for each row
    for total_gib, least, most in ((80, 440, 500), (140, 880, 960)):
        found = fit(total_gib << 30, 1, 1)
        assert least < found < most
        assert 8.5e9 + 2000 * token_bytes * found < 0.92 * (total_gib << 30)
    assert fit(80 << 30, 2, 2) < fit(80 << 30, 1, 1) / 2
    assert fit(1 << 40, 1, 1) == 1024


# --- all in one -------------------------------------------------------------------------------------------------


def jobs(module: ModuleType) -> tuple[Any, ...]:
    def job(name: str, code: str, most_s: float = 20, least_s: float = 0) -> Any:
        command = (sys.executable, "-S", "-c", f"out = '{{out}}/gpu_{name}.json'\n{code}")
        return module.Job(name, "", command, most_s, least_s)

    write = "import json; json.dump({'results': {'cases': []}}, open(out, 'w')); print('wrote it', flush=True)"
    return (
        job("fails", "raise SystemExit('no such device')"),
        job("hangs", f"{write}; import time; time.sleep(60)", most_s=5),
        job("works", write),
        job("long", write, least_s=1e6),
    )


@pytest.fixture(name="run_all")
def runner(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("gpu_all")
    monkeypatch.setattr(module, "JOBS", jobs(module))

    def run(out: Path, **options: Any) -> dict[str, str]:
        out.mkdir(exist_ok=True)
        asked = {"out": out, "budget_s": 60.0, "only": None, "resume": None, "archive": None, "dry": False, **options}
        outcomes = module.run_all(argparse.Namespace(**asked), dict(os.environ), time.monotonic())
        return {each["name"]: each["status"] for each in outcomes}

    return run


@pytest.mark.system
def test_a_job_that_fails_or_hangs_takes_no_other_along(
    run_all: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_all(tmp_path / "first")
    assert found["fails"] == "ended with status 1"
    assert found["hangs"] == "stopped after 5 s"
    assert found["works"] == "done"
    assert re.fullmatch(r"skipped: \d\d s were left, and it takes 1000000", found["long"])
    assert (tmp_path / "first" / "gpu_hangs.json").exists(), "what it had written stays"
    output = capsys.readouterr().out
    assert "no such device" in output
    assert output.count("wrote it") == 2


def test_what_an_earlier_call_did_is_taken_over_and_the_rest_is_run(
    run_all: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_all(first, only=["works"]) == {"works": "done"}
    (first / "gpu_works.json").write_text('{"results": {"cases": [1]}}')
    found = run_all(second, resume=first, budget_s=0.0)
    assert found["works"] == "done"
    assert json.loads((second / "gpu_works.json").read_text())["results"]["cases"] == [1]
    assert {name for name, status in found.items() if status.startswith("skipped")} == {"fails", "hangs", "long"}


def test_an_archive_has_results_and_compiled_kernels_and_can_be_gone_on_with(
    load: Any, run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a machine from which few files come back: one file, whole after each job."""
    module, first, archive = load("gpu_all"), tmp_path / "first", tmp_path / "back" / "run.tar.gz"
    (first / module.KERNELS / "ABC").mkdir(parents=True)
    (first / module.KERNELS / "ABC" / "kernel.cubin").write_bytes(b"code")
    (first / "pipe").symlink_to("/nowhere")
    assert run_all(first, only=["works"], archive=archive) == {"works": "done"}
    assert [file.name for file in archive.parent.iterdir()] == ["run.tar.gz"]
    before = archive.read_bytes()
    monkeypatch.setattr(tarfile.TarFile, "add", lambda *args, **options: (_ for _ in ()).throw(OSError("disk full")))
    assert run_all(first, only=["works"], archive=archive) == {"works": "done"}, "what was measured is not lost"
    assert archive.read_bytes() == before
    monkeypatch.undo()
    second = tmp_path / "second"
    found = run_all(second, resume=module.unpacked(archive, tmp_path / "unpacked"), only=["long"], archive=archive)
    assert found["works"] == "done"
    assert (second / module.KERNELS / "ABC" / "kernel.cubin").read_bytes() == b"code"
    assert (second / "gpu_works.json").exists()
    assert not (second / "pipe").exists()


def test_an_archive_leaves_out_kernels_rather_than_be_too_large_to_come_back(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, out, archive = load("gpu_all"), tmp_path / "out", tmp_path / "run.tar.gz"
    monkeypatch.setattr(module, "MOST_PACKED_BYTES", 300_000)
    for number in range(40):
        folder = out / module.KERNELS / f"{number:02}"
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(os.urandom(20_000))
        os.utime(folder, (1000.0 - number, 1000.0 - number))
    (out / "gpu_all.json").write_text(json.dumps({"jobs": []}))
    module.pack(out, archive)
    assert archive.stat().st_size < 400_000
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert "gpu_all.json" in names
    kernels = [Path(name).parts[1] for name in names if name.endswith(".cubin")]
    assert 10 < len(kernels) < 20
    assert kernels == [f"{39 - number:02}" for number in range(len(kernels))], "the oldest first"


def test_what_was_never_begun_comes_before_what_did_not_end_well(
    load: Any, run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("gpu_all")
    patience = {"hangs": 0.2}
    shorter = tuple(replace(each, most_s=patience.get(each.name, each.most_s)) for each in module.JOBS)
    monkeypatch.setattr(module, "JOBS", shorter)
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_all(first, only=["fails"]) == {"fails": "ended with status 1"}
    assert [*run_all(second, resume=first)] == ["hangs", "works", "long", "fails"]


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ("52 skipped in 0.61s", "skipped: every test was"),
        ("52 skipped, 1 warning in 0.61s", "skipped: every test was"),
        ("3 passed, 49 skipped in 0.61s", "done"),
    ],
)
def test_tests_that_were_all_skipped_are_not_done(
    load: Any, run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, summary: str, status: str
) -> None:
    module = load("gpu_all")
    command = (sys.executable, "-S", "-c", f"print('=== {summary} ===')")
    monkeypatch.setattr(module, "JOBS", (module.Job("tests", "", command, 20, 0),))
    assert run_all(tmp_path) == {"tests": status}
    assert run_all(tmp_path / "dry", dry=True) == {}, "tests have no dry run"


def test_all_jobs_fit_three_runs_of_540_s(load: Any) -> None:
    assert sum(job.most_s for job in load("gpu_all").JOBS) <= 3 * 540


def test_a_checkout_that_is_not_installed_is_imported_through_links(load: Any, tmp_path: Path) -> None:
    gpu_all = load("gpu_all")
    tree = gpu_all.link_tree(tmp_path)
    code = (
        "import importlib.metadata, headrace.ipc; print(headrace.ipc.__file__, importlib.metadata.version('headrace'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-S", "-c", code]  # without what is installed
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, version = found.stdout.split()
    assert file.startswith(str(tree))
    assert version == gpu_all.LINKED_VERSION


def test_the_table_says_what_was_reached_and_what_was_not_measured(load: Any, tmp_path: Path) -> None:
    table, limits = load("gpu_table"), {"device": "NVIDIA H200", "copy_bytes_s": 4.3e12, "bf16_flop_s": 788e12}

    def write(name: str, cases: list[dict[str, Any]], **more: Any) -> None:
        results = {"model": "llama-8b", "limits": limits, "cases": cases, **more}
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))

    of = {"context": 1024, "bound_by": "bandwidth", "gap_us": 60.0}
    write(
        "gpu_decode",
        [
            {"weights": "bf16", "batch": 1, "share_of_limit": 0.87, "tokens_s": 240.0, **of},
            {"weights": "bf16", "batch": 64, "share_of_limit": 0.87, "tokens_s": 9000.0, **of},
            {"weights": "bf16", "batch": 256, "failed": "out of memory"},
            {"weights": "fp8", "batch": 1, "share_of_limit": 0.8, "tokens_s": 360.0, **of},
        ],
    )
    write("gpu_serving", [{"case": "full", "out_tok_s": 18000.0}], published=load("gpu_serving").PUBLISHED)
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in table.table(tmp_path).splitlines()[2:13]}
    assert rows["Llama-3.1-8B bf16, decode batch 1, context 1k"][-1] == "yes |"
    assert rows["the same, batch 256"] == ["not measured", "80%", "- |"]
    assert rows["Llama-3.1-8B fp8, decode batch 1, beside bf16"][0].startswith("1.50 x")
    assert rows["Llama-3.1-8B fp8, decode batch 1, beside bf16"][-1] == "no |"
    assert rows["gap between decode graphs, batch 64"] == ["60 us", "under 50 us", "no |"]
    assert rows["Llama-3.1-8B fp8, 1000 in, 1000 out, full load"][-1] == "yes |"
    assert "4.30 TB/s" in table.table(tmp_path)
    assert "17,744 on H200" in table.table(tmp_path)


def test_the_readmes_table_is_the_results(load: Any) -> None:
    table, text = load("gpu_table"), (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    assert shown == table.table(ROOT / "benchmarks" / "results").strip()
