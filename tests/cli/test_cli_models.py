"""`headrace models`: lists, fetches and removes what this machine keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import serve_hub

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 5000, "notes.txt": b"not needed"}
REPOSITORIES = {"someone/small": {"main": FILES, "v2": {**FILES, "model.safetensors": b"y" * 7000}}}


def run(*arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "models", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


def test_a_model_is_fetched_listed_and_removed(tmp_path: Path, private_cache: Path) -> None:
    private_cache.mkdir(parents=True, exist_ok=True)
    (private_cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"z" * 1_200_000)
    with serve_hub(REPOSITORIES) as address:
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        assert json.loads(run("--json", **hub).stdout)[0]["model"] == "SmolLM2-135M-Instruct"
        folder = Path(run("fetch", "someone/small", **hub).stdout.strip())
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        run("fetch", "someone/small", "--revision", "v2", **hub)
        listed = {each["model"]: each for each in json.loads(run("--json", **hub).stdout)}
        assert listed["someone/small"]["size_bytes"] >= 12000
        table = run(**hub).stdout.splitlines()
        assert table[0].split() == ["MODEL", "SIZE", "USED", "PATH"]
        assert table[1].startswith("SmolLM2-135M-Instruct  1 MB")
        assert "missing/model" in run("fetch", "missing/model", status=1, **hub).stderr
        assert "someone/other" in run("remove", "someone/other", status=1, **hub).stderr
        assert run("remove", "someone/small", **hub).stdout.startswith("removed someone/small: 12 kB freed")
        assert not folder.exists()
        run("remove", "SmolLM2-135M-Instruct", **hub)
        assert json.loads(run("--json", **hub).stdout) == []


def test_it_is_asked_before_a_terminal_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.frontend.cli.commands import models

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, agreed in (("", False), ("n", False), ("Y", True), ("yes", True)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert models._agreed("a/b") is agreed
