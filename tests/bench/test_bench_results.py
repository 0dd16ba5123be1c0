"""What reads results: comparisons that know chance, plots and pages, sweeps that go on where they were."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import fake_server as fake
import pytest

from headrace.frontend.bench.results.compare import (
    INDISTINCT,
    NUM_SLICES,
    Measure,
    bootstrap,
    compare,
    differences,
    measures,
    tokens_per_slice,
    verdict,
    welch,
)
from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.plot import pareto
from headrace.frontend.bench.sweep import flags
from headrace.frontend.cli.main import main


def serving_record(seed: int, *, slower: float = 1.0, label: str = "", num_requests: int = 60) -> dict[str, Any]:
    """As `bench serve` writes it: requests of 20 tokens, one after another, with times that vary by 10%."""
    numbers = random.Random(seed)
    requests, now_s = [], 0.0
    for index in range(num_requests):
        ttft_s = 0.05 * slower * numbers.gauss(1, 0.1)
        gaps_s = [0.01 * slower * numbers.gauss(1, 0.1) for _ in range(19)]
        e2e_s = ttft_s + sum(gaps_s)
        requests.append(
            {
                "index": index, "sent_s": now_s, "end_s": now_s + e2e_s, "ttft_s": ttft_s, "e2e_s": e2e_s,
                "gaps_s": gaps_s, "num_output_tokens": 20, "num_prompt_tokens": 5,
            }
        )  # fmt: skip
        now_s += e2e_s
    results = {
        "duration": now_s, "completed": num_requests, "failed": 0, "errors": {}, "generator": {"warning": ""},
        "output_throughput": 20 * num_requests / now_s, "request_throughput": num_requests / now_s,
    }  # fmt: skip
    return {
        "benchmark": "serve", "label": label, "results": results, "samples": {"requests": requests},
        "arguments": {}, "machine": {"CPU": "one"}, "seed": seed, "versions": {},
    }  # fmt: skip


def write(path: Path, record: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return str(path)


@pytest.mark.system
def test_two_runs_of_the_same_are_not_distinguished() -> None:
    verdicts = [
        row.verdict
        for seed in range(0, 40, 2)
        for row in compare([serving_record(seed)], [serving_record(seed + 1)])
        if row.interval is not None
    ]
    assert len(verdicts) == 20 * 5
    assert verdicts.count(INDISTINCT) >= 99  # 95% intervals, and these runs vary less than is assumed of real ones


def test_a_real_difference_is_found_and_its_direction_told() -> None:
    rows = {row.name: row for row in compare([serving_record(1)], [serving_record(2, slower=1.3)])}
    for name in ("time to first token", "time per output token", "inter-token latency", "end to end"):
        row = rows[name]
        assert row.verdict.endswith("WORSE")
        assert row.interval is not None
        assert 1.0 < row.interval[0] <= row.ratio <= row.interval[1]
        assert row.ratio == pytest.approx(1.3, abs=0.07)
    assert rows["output tokens/s"].ratio == pytest.approx(1 / 1.3, abs=0.02)
    assert rows["requests/s"].verdict == "one value each: cannot tell"


def test_with_three_runs_each_a_run_is_the_unit() -> None:
    same = compare([serving_record(seed) for seed in range(3)], [serving_record(seed) for seed in range(3, 6)])
    assert {row.verdict for row in same} == {INDISTINCT}
    worse = compare(
        [serving_record(seed) for seed in range(3)], [serving_record(seed, slower=1.2) for seed in range(3, 6)]
    )
    assert {row.name: row.verdict[-5:] for row in worse}["requests/s"] == "WORSE"


def test_intervals_agree_with_what_statistics_say() -> None:
    # Student's t at 97.5% for 5 degrees of freedom (Welch's 5.69, rounded down) is 2.5706, by integrating its density.
    low, high = welch([10.0, 10.5, 9.8, 10.2], [11.0, 11.5, 10.6, 11.4])
    assert (low, high) == pytest.approx((1.03356, 1.16763), abs=1e-4)
    flat = Measure(5.0, "ms", False, [5.0] * 9)
    assert bootstrap(flat, flat, random.Random(0)) == (1.0, 1.0)
    assert verdict(2.0, (1.5, 2.5), higher_is_better=True) == "100.0% better"
    assert verdict(0.5, (0.4, 0.6), higher_is_better=True) == "50.0% WORSE"


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = sorted(random.Random(0).random() for _ in range(37))
    for percent in (0, 1, 50, 90, 99.5, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_tokens_are_counted_when_they_came() -> None:
    requests = [{"index": 0, "sent_s": 0.0, "ttft_s": 0.05, "gaps_s": [0.9], "num_output_tokens": 2}]
    slices = tokens_per_slice(requests, {"duration": 1.0})
    assert [index for index, rate in enumerate(slices) if rate] == [1, 19]
    assert sum(slices) / NUM_SLICES == pytest.approx(2.0)


def test_the_command_compares_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.json", serving_record(1)), write(tmp_path / "b.json", serving_record(2, slower=1.3))
    assert main(["bench", "compare", a, b]) == 0
    printed = capsys.readouterr().out
    assert "WORSE" in printed
    assert "give folders of 3 runs or more" in printed
    for seed in range(3):
        write(tmp_path / "base" / f"{seed}.json", serving_record(seed))
        write(tmp_path / "new" / f"{seed}.json", serving_record(seed + 3) | {"arguments": {"request_rate": 5}})
    assert main(["bench", "compare", str(tmp_path / "base"), str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "over 3 and 3 runs" in printed
    assert "NOTE: other arguments: request_rate default and 5" in printed
    assert main(["bench", "compare", a, b, "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["rows"]} == set(measures(serving_record(1)))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("nonsense", "is not JSON"),
        ("[]", "is no result of `headrace bench`"),
        (json.dumps({"benchmark": "latency", "results": {}}), "have nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_told(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = write(tmp_path / "good.json", serving_record(1)), tmp_path / "other.json"
    if content is not None:
        other.write_text(content)
    assert main(["bench", "compare", good, str(other)]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_a_plot_is_written_in_every_form_and_the_page_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = serving_record(2, slower=1.3, label="<new>")
    failing["samples"]["requests"].append(
        {"index": 60, "sent_s": 1.0, "end_s": 1.1, "cause": "HTTP 500", "detail": "<b>no</b>"}
    )
    failing["results"] |= {"failed": 1, "errors": {"HTTP 500": {"count": 1, "example": "<b>no</b>"}}}
    failing["results"]["generator"] = {"warning": "the generator is slow"}
    files = [write(tmp_path / "a.json", serving_record(1, label="old")), write(tmp_path / "b.json", failing)]
    assert main(["bench", "plot", *files, "-o", str(tmp_path / "out" / "two")]) == 0
    assert (tmp_path / "out" / "two.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "two.svg").read_text()
    page = (tmp_path / "out" / "two.html").read_text()
    assert "&lt;new&gt;" in page
    assert "<new>" not in page
    assert "<b>no</b>" not in page
    assert "WORSE" in page
    assert "the generator is slow" in page
    for loads in ("<script", "src=", 'href="http', "@import", "<link"):
        assert loads not in page


def test_every_benchmark_has_a_plot(tmp_path: Path) -> None:
    phases = {"import headrace": 0.2, "start the engine": 1.0}
    results = {
        "latency": ({}, {"latencies": [1.0, 1.1], "requests": [{"ttft_s": 0.1, "e2e_s": 1.0}]}),
        "throughput": ({"output_tokens_per_second": 5.0, "tokens_per_second": 9.0, "requests_per_second": 1.0}, {}),
        "startup": (
            {"cold_phases_s": phases},
            {"cold": [{"total_s": 1.2, "phases": phases, "engine": {"load weights": 0.5}}], "warm": []},
        ),
        "overhead": (
            {"core_us_per_step": {"1": 50.0, "32": 90.0}, "http_tokens_per_core_s": 9e4, "http_idle_stream_bytes": 2e4},
            {"socket_us": [100.0, 120.0], "ring_us": [8.0, 9.0]},
        ),
        "sweep": (
            {"points": [{"name": "a", "output_throughput": 5.0, "median_ttft_ms": 3.0, "median_tpot_ms": None}]},
            {},
        ),
    }
    for kind, (figures, samples) in results.items():
        record = {**serving_record(0), "benchmark": kind, "results": figures, "samples": samples}
        path = write(tmp_path / f"{kind}.json", record)
        assert main(["bench", "plot", path, "-o", str(tmp_path / kind), "--format", "html"]) == 0
        assert "<svg" in (tmp_path / f"{kind}.html").read_text()


def test_plots_of_what_does_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", serving_record(1))
    b = write(tmp_path / "b.json", {**serving_record(1), "benchmark": "latency"})
    c = write(tmp_path / "c.json", {**serving_record(1), "benchmark": "other"})
    for paths, sentence in (([a, b], "cannot share a plot"), ([c], "there is no plot of a result of other")):
        assert main(["bench", "plot", *paths, "-o", str(tmp_path / "x")]) == 2
        assert sentence in capsys.readouterr().err


def test_the_pareto_front_holds_what_nothing_beats() -> None:
    points = [(1.0, 10.0, "a"), (2.0, 9.0, "b"), (3.0, 30.0, "c"), (3.0, 20.0, "d"), (0.5, 1.0, "e")]
    assert [name for _, _, name in pareto(points)] == ["e", "a", "c"]


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = tmp_path / "load.json"
    params.write_text('{"slow": {"max_concurrency": 1}, "fast": {"request_rate": 200}}')
    with fake.FakeServer(fake.stream) as server:
        shape = "--num-prompts 5 --random-input-len 4 --random-output-len 4"
        load = f"headrace bench serve --base-url {server.url} {shape}"
        arguments = ["bench", "sweep", "--bench-cmd", load, "--bench-params", str(params), "--num-runs", "1"]
        arguments += ["-o", str(tmp_path), "-e", "here"]
        assert main([*arguments, "--dry-run"]) == 0
        assert "--max-concurrency 1" in capsys.readouterr().out
        assert not server.bodies
        assert main(arguments) == 0
        assert len(server.bodies) == 10
        summary = json.loads((tmp_path / "here" / "summary.json").read_text())
        assert [point["name"] for point in summary["results"]["points"]] == ["slow", "fast"]
        assert (tmp_path / "here" / "pareto.png").exists()
        assert main(arguments) == 2
        assert "go on with --resume" in capsys.readouterr().err
        (tmp_path / "here" / "fast-run0.json").unlink()
        assert main([*arguments, "--resume"]) == 0
        assert len(server.bodies) == 15


def test_parameters_of_a_sweep_are_flags_as_a_command_line_has_them() -> None:
    params = {
        **{"max_num_seqs": 4, "--block-size": 16, "enable_prefix_caching": False, "enforce_eager": True, "seed": None},
        **{
            "hf_overrides.rope_theta": 5,
            "hf_overrides.use_cache": False,
            "names": ["a", "b"],
            "hf_overrides": {"a_b": 1},
        },
    }
    assert flags(params) == [
        *("--max-num-seqs", "4", "--block-size", "16", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--hf-overrides.rope_theta", "5", "--hf-overrides.use_cache=false", "--names", "a", "b"),
        *("--hf-overrides", '{"a_b": 1}'),
    ]


def test_a_sweep_tells_which_command_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake.FakeServer(fake.refuse(500)) as server:
        load = f"headrace bench serve --base-url {server.url} --num-prompts 2 --random-input-len 4"
        arguments = ["bench", "sweep", "--bench-cmd", load, "--num-runs", "1", "-o", str(tmp_path), "-e", "here"]
        assert main(arguments) == 1
        printed = capsys.readouterr().err
    assert "ended with exit status 1" in printed
    assert "HTTP 500: 2" in printed
    assert not list((tmp_path / "here").glob("*-run*.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--serve-params", "{tmp}/missing.json"), "--serve-params="),
        (("--bench-params", "{tmp}/wrong.json"), "must be a list of objects"),
        (("--num-runs", "0"), "--num-runs=0"),
        (("--serve-params", "{tmp}/right.json"), "name it with --serve-cmd"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.json").write_text("[3]")
    (tmp_path / "right.json").write_text('[{"max_num_seqs": 1}]')
    given = [each.format(tmp=tmp_path) for each in arguments]
    assert main(["bench", "sweep", "-o", str(tmp_path), *given]) == 2
    assert sentence in capsys.readouterr().err


def test_single_runs_that_differ_by_what_runs_differ_are_not_distinguished() -> None:
    rows = compare([serving_record(1)], [serving_record(2, slower=1.08)])
    assert {row.verdict for row in rows if row.interval is not None} == {INDISTINCT}
    runs = [[serving_record(seed, slower=slower) for seed in range(3)] for slower in (1.0, 1.08)]
    by_run = {row.name: row.verdict for row in compare(*runs)}
    assert by_run["end to end"].endswith("WORSE"), "three runs tell it"


def test_a_busy_machine_is_named() -> None:
    quiet, busy = serving_record(1), serving_record(2)
    for record, load in ((quiet, 0.3), (busy, 7.5)):
        record["machine"] |= {"load_average": load, "usable_threads": 2}
    assert differences(quiet, busy) == ["a busy machine: load 7.5 on 2 threads when new began; figures vary more"]


@pytest.mark.system
def test_points_of_a_sweep_whose_names_make_one_file_name_have_results_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = tmp_path / "load.json"
    params.write_text(json.dumps([
        {"_benchmark_name": "a/b", "request_rate": 200},
        {"_benchmark_name": "a b", "request_rate": 300},
        {"_benchmark_name": "A_B", "request_rate": 400},
        {"_benchmark_name": "x" * 300, "request_rate": 500},
    ]))  # fmt: skip
    with fake.FakeServer(fake.stream) as server:
        load = (
            f"headrace bench serve --base-url {server.url} --num-prompts 2 --random-input-len 4 --random-output-len 4"
        )
        arguments = ["bench", "sweep", "--bench-cmd", load, "--bench-params", str(params), "--num-runs", "1"]
        arguments += ["-o", str(tmp_path), "-e", "here"]
        assert main(arguments) == 0
        assert len(server.bodies) == 8
        assert len(list((tmp_path / "here").glob("*-run0.json"))) == 4
        assert main([*arguments, "--resume"]) == 0
        assert len(server.bodies) == 8
        capsys.readouterr()
        params.write_text(params.read_text().replace("500", "600"))
        assert main([*arguments, "--resume"]) == 2
        assert "is of another bench_params" in capsys.readouterr().err
        params.write_text(params.read_text().replace("600", "500"))
        arguments[3] = load + " --seed 3"
        assert main([*arguments, "--resume"]) == 2
        assert "is of another bench_cmd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--save-result", "--result-dir", "/proc/nowhere"], "--result-dir=/proc/nowhere: /proc is no folder"),
        (["--output-json", "/proc/result.json"], "--output-json=/proc/result.json: /proc is no folder"),
        (["--output-json", "."], "--output-json=.: . is a folder"),
        (["--save-result", "--result-filename", "/dev/null/x.json"], "/dev/null is no folder"),
    ],
)
def test_a_result_that_cannot_be_saved_is_told_before_the_run(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake.FakeServer(fake.stream) as server:
        assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2", *given]) == 2
        assert said in capsys.readouterr().err
        assert not server.bodies
