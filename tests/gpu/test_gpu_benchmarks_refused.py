"""What the GPU's benchmarks refuse in a sentence: no GPU, folders of another kind of run, values that there are not."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="load")
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


SCRIPTS = ("decode", "prefill", "kernels", "greedy", "serving", "startup", "linear")


def refusal(load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *asked: str) -> str:
    """What a script ends with, of which its first argument is the name."""
    script = load(asked[0])
    monkeypatch.setattr(sys, "argv", list(asked))
    with pytest.raises(SystemExit) as ended:
        script.main()
    message = capsys.readouterr().err if ended.value.code == 2 else str(ended.value)
    assert ended.value.code not in (0, None)
    assert "Traceback" not in message
    return message


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_a_script_says_so_in_a_sentence(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    message = refusal(load, monkeypatch, capsys, f"gpu_{name}")
    assert message.startswith("device=cuda cannot be used: ")
    assert message.endswith("--dry tries the benchmarks with a tiny model on the CPU")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("gpu_linear --dry --only nosuch", "--only 'nosuch' is in no name that there is: gate up bf16; gate up fp8"),
        ("gpu_kernels --dry --only nosuch", "there is: linear qkv bf16; linear qkv fp8"),
        ("gpu_decode --dry --batch 0", "--batch: '0' is not a whole number of 1 or more"),
        ("gpu_decode --dry --steps 0", "--steps: '0' is not a whole number of 1 or more"),
        ("gpu_decode --context 40 --steps 64", "--context 40 leaves no prompt: 64 steps need more than 40"),
        ("gpu_decode --beside 40 --steps 64", "--beside 40 leaves no prompt: 64 steps need more than 40"),
        ("gpu_decode --dry --device gpu", "'gpu' is no GPU's name; cuda and cuda:INDEX are"),
        ("gpu_allreduce", "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start it by torchrun"),
        ("gpu_all --wheels {empty}", "empty holds no .whl file"),
        ("gpu_all --wheels {empty}/none", "none holds no .whl file"),
        ("gpu_all --resume {empty}", "empty holds no gpu_all.json; name the --out of an earlier call"),
        ("gpu_all --resume {empty}/../none.tar.gz", "holds no gpu_all.json"),
        ("gpu_all --resume {dry}/gpu_all.json", "gpu_all.json is neither a folder nor a .tar.gz of --archive: "),
        ("gpu_all --archive {empty}/run.zip", "run.zip: its name must end in .tar.gz"),
        ("gpu_all --resume {dry}", "that is a dry run; a real run needs another folder"),
        ("gpu_all --out {dry}", "that is a dry run; a real run needs another folder"),
        ("gpu_all --dry --resume {real}", "that is a real run; a dry run needs another folder"),
        ("gpu_all --dry --only tests", "the tests of a GPU have no dry run"),
        ("gpu_all --table --out {empty}", "empty has no JSON of a run on a GPU"),
        ("gpu_all --table --out {dry}", "dry has no JSON of a run on a GPU"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_a_sentence(
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    asked: str,
    told: str,
) -> None:
    for name in ("empty", "dry", "real"):
        (tmp_path / name).mkdir()
    for name in ("dry", "real"):
        (tmp_path / name / "gpu_all.json").write_text(json.dumps({"dry": name == "dry", "jobs": []}))
    (tmp_path / "dry" / "gpu_decode.json").write_text('{"results": {"dry": true, "cases": []}}')
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))  # which a dry run sets
    readme = (ROOT / "README.md").read_bytes()
    folders = {name: tmp_path / name for name in ("empty", "dry", "real")}
    if "--out" not in asked and asked.startswith("gpu_all"):
        asked += f" --out {tmp_path / 'out'}"
    message = refusal(load, monkeypatch, capsys, *(part.format(**folders) for part in asked.split()))
    assert told in message
    assert (ROOT / "README.md").read_bytes() == readme
    assert not (tmp_path / "out").exists()


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_nothing_of_all_is_started(
    load: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all", "--only", "tests", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        load("gpu_all").main()
    assert ended.value.code == 1
    found = capfd.readouterr()
    (sentence,) = [line for line in found.err.splitlines() if line]
    assert sentence.startswith("device=cuda cannot be used: ")
    assert "===" not in found.out
    assert not (tmp_path / "out").exists()
