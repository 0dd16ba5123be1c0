"""The regression gate, as it judges and as its cases run, and the table of peers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(name="scripts")
def scripts_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


@pytest.mark.usefixtures("scripts")
def test_counts_are_judged_by_the_limit() -> None:
    check = load("check")
    assert not check.judge_count("codec", 1000, 1000 * (1 + check.COUNT_LIMIT)).is_worse
    assert check.judge_count("codec", 1000, 1001 + 1000 * check.COUNT_LIMIT).is_worse
    assert not check.judge_count("codec", 1000, 500).is_worse


@pytest.mark.usefixtures("scripts")
def test_times_are_worse_only_when_the_whole_interval_says_so() -> None:
    check, numbers = load("check"), random.Random(0)
    noisy = [100 * numbers.gauss(1, 0.15) for _ in range(14)]
    assert not check.judge_times("norm", noisy[:7], noisy[7:]).is_worse
    steady = [100 * numbers.gauss(1, 0.01) for _ in range(14)]
    assert check.judge_times("norm", steady[:7], [1.2 * each for each in steady[7:]]).is_worse
    assert not check.judge_times("norm", steady[:7], [1.02 * each for each in steady[7:]]).is_worse


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("case", ["scheduler step", "ring", "codec", "detokeniser"])
def test_every_counted_case_runs(case: str) -> None:
    assert case in load("check").COUNTED
    load("check_cases").CASES[case](5)


@pytest.mark.usefixtures("scripts")
def test_a_case_that_does_not_run_is_named_with_its_reason() -> None:
    check = load("check")
    with pytest.raises(check.CaseError, match="KeyError: 'no such case'"):
        check._run([sys.executable, str(BENCHMARKS / "check_cases.py"), "no such case", "1"], {})


@pytest.mark.usefixtures("scripts")
def test_a_commit_is_compared_by_its_own_modules_and_by_its_own_cases_where_those_have_moved(tmp_path: Path) -> None:
    check = load("check")
    for folder in (*check.FOLDERS, "headrace", "benchmarks"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
        (tmp_path / "tree" / folder / "__init__.py").touch()
    (tmp_path / "tree" / check.CASES).write_text("import headrace.ipc")
    side = check.side_of(tmp_path / "tree", check.layout(tmp_path / "tree", tmp_path / "path"))
    with pytest.raises(check.CaseError, match=r"No module named 'headrace\.ipc\.transport'"):
        check._run([sys.executable, "-c", "import headrace.ipc.transport.ring"], side.variables)
    assert side.program("ring") == tmp_path / "tree" / check.CASES


@pytest.mark.usefixtures("scripts")
def test_the_table_of_peers_has_a_column_for_each_and_the_ratio_to_the_best() -> None:
    peers = load("peers")

    def rows(rate: float) -> list[dict[str, dict[str, dict[str, float]]]]:
        return [{"rows": {"decode_1": {"out_tok_s": rate, "in_tok_s": 1.0}}}]

    samples = {"headrace bf16": rows(300.0), "vllm": rows(100.0), "transformers": rows(150.0)}
    lines = peers.table({"samples": samples, "weights_bytes": {}, "limits": [{"read_gigabytes_per_s": 50.0}]})
    assert "| what (tok/s) | Headrace | vLLM | transformers | to the best | to reach |" in lines
    assert "| decode, 1 stream, bf16 | 300 | 100 | 150 | 2.00 x | 1.5 x |" in lines


@pytest.mark.usefixtures("scripts")
def test_the_readme_holds_the_table_of_the_last_sitting() -> None:
    import json

    peers = load("peers")
    text = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    inside = text.partition(peers.BEGIN)[2].partition(peers.END)[0]
    assert inside.strip() == peers.table(json.loads(peers.RESULTS.read_text())["results"]).strip()
