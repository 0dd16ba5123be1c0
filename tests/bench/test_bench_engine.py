"""The benchmarks of our own engine, with one that computes nothing: figures add up and files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_server import serving

from headrace.frontend.cli.main import main

NULL = ("--model", "null", "--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor")

pytestmark = pytest.mark.usefixtures("private_cache")


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert main(["bench", *arguments, "--output-json", str(path), "--no-machine-probe"]) == 0
    record: dict[str, Any] = json.loads(path.read_text())
    for name in ("benchmark", "date", "machine", "versions", "seed", "arguments", "results", "samples"):
        assert name in record
    return record


def test_latency_counts_its_runs_and_splits_them_into_first_and_other_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (
        "--batch-size",
        "3",
        "--input-len",
        "8",
        "--output-len",
        "5",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    record = bench(tmp_path, "latency", *NULL, *shape, "--hf-overrides", '{"step_delay_s": 0.01}')
    figures = record["results"]
    assert len(record["samples"]["latencies"]) == 4
    assert len(record["samples"]["requests"]) == 12
    assert figures["avg_latency"] >= 5 * 0.01
    assert figures["median_ttft_ms"] >= 10
    assert figures["median_tpot_ms"] >= 10
    assert figures["median_ttft_ms"] + 4 * figures["median_tpot_ms"] <= figures["max_e2el_ms"] + 1
    assert record["engine"]["max_model_len"] == 32768
    assert record["engine"]["stats"]["num_running"] == 0
    assert "time to first token" in capsys.readouterr().out


def test_throughput_runs_the_workload_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--num-prompts", "20", "--random-input-len", "6", "--random-output-len", "4", "--seed", "5")
    _, model, *backend = NULL
    record = bench(tmp_path, "throughput", model, *backend, *asked)  # the model by its place, as `serve` takes it
    figures = record["results"]
    assert (figures["num_requests"], figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 120, 80)
    assert figures["tokens_per_second"] == pytest.approx(200 / figures["elapsed_time"])
    assert record["seed"] == 5
    assert record["engine"]["model"] == "null"
    assert "20 requests, 120 tokens in, 80 out" in capsys.readouterr().out


@pytest.mark.system
def test_startup_is_told_by_phase_cold_and_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(
        tmp_path, "startup", *NULL, "--num-iters-cold", "1", "--num-iters-warm", "1", "--num-iters-warmup", "0",
        "--hf-overrides", '{"load_delay_s": 0.2}',
    )  # fmt: skip
    for kind in ("cold", "warm"):
        (sample,) = record["samples"][kind]
        assert sample["phases"]["start the engine"] >= sample["engine"]["load weights"] >= 0.2
        assert record["results"][f"avg_{kind}_startup_time"] == pytest.approx(sum(sample["phases"].values()))
    assert "to the first token" in capsys.readouterr().out


def test_a_start_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "startup", "--model", "/no/such/model", "--num-iters-cold", "1", "--num-iters-warm", "0"]) == 1
    )
    printed = capsys.readouterr().err
    assert "there is no model at /no/such/model" in printed
    assert "Traceback" not in printed


@pytest.mark.system
def test_overhead_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(tmp_path, "overhead", "--running", "4", "--num-steps", "100", "--num-idle-streams", "20")
    figures = record["results"]
    assert record["samples"]["core"]["4"]["steps"] >= 100
    assert figures["core_us_per_step"]["4"] >= figures["core_busiest_thread_us_per_step"]["4"] > 0
    for name in ("socket_round_trip_us", "ring_round_trip_us"):
        assert 0 < figures[name]["p50"] <= figures[name]["p99"]
    assert figures["http_tokens_per_core_s"] > 0
    assert "memory per idle stream" in capsys.readouterr().out


def test_serve_measures_our_own_server(tmp_path: Path) -> None:
    with serving() as server:
        record = bench(
            tmp_path, "serve", "--base-url", server.url, "--num-prompts", "30", "--random-input-len", "5",
            "--random-output-len", "8", "--random-vocab-size", "300", "--ignore-eos", "--request-rate", "100",
        )  # fmt: skip
    figures = record["results"]
    assert (figures["completed"], figures["errors"]) == (30, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (150, 240)
    assert record["server"]["version"]["version"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("latency", *NULL, "--batch-size", "0"), "--batch-size=0"),
        (
            ("latency", *NULL, "--input-len", "30000", "--output-len", "3000"),
            "are more than the model's length of 32768",
        ),
        (("startup", *NULL, "--num-iters-cold", "0", "--num-iters-warm", "0"), "nothing would be measured"),
        (("overhead", "--running", "many"), "whole numbers from 1 to 4096"),
        ((), "name what to measure"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
