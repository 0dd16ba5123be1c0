"""A disk that is full or read-only, where a log, caches, a profile or results should go: said, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from http_server import HERE, null_engine_arguments
from patience import within

from headrace import LLM, SamplingParams
from headrace.ipc.failure import HeadraceError

pytestmark = pytest.mark.system
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no disk of 64 KiB can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(OSError, match="Read-only"):
        (disk / "any").mkdir()


WRITES_FAIL: dict[str, Callable[[Path], None]] = {"full": fill, "read-only": make_read_only}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        env={**os.environ, **ENVIRONMENT, **environment}, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def batch(folder: Path, count: int) -> str:
    file = folder / "in.jsonl"
    body = {"model": "null", "prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
    lines = ({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(count))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_a_batch_whose_output_has_no_room_says_so_keeps_whole_lines_and_can_be_resumed(
    disk: Path, tmp_path: Path
) -> None:
    output = disk / "out.jsonl"
    asked = ("run-batch", "-i", batch(tmp_path, 400), "-o", str(output), "--model", *null_engine_arguments())
    done = run(*asked)
    assert done.returncode == 1
    assert f"cannot write the output file {output}: no space left on device; what it has stays" in done.stderr
    kept = output.read_text()
    assert kept.endswith("\n")
    assert 0 < len(kept.splitlines()) < 400
    larger = tmp_path / "larger.jsonl"
    larger.write_text(kept)
    done = run(*(str(larger) if each == str(output) else each for each in asked), "--resume")
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in larger.read_text().splitlines()]
    assert sorted(ids, key=int) == [str(n) for n in range(400)]


@pytest.mark.parametrize("state", WRITES_FAIL)
def test_a_server_whose_log_and_caches_cannot_be_written_serves_and_ends_as_ever(
    disk: Path, tmp_path: Path, state: str
) -> None:
    """A log that is on a full disk; a service's log is elsewhere where its disk is read-only."""
    (disk / "log").touch()
    WRITES_FAIL[state](disk)
    socket, home = tmp_path / "s", {name: str(disk / name) for name in ("HOME", "XDG_CACHE_HOME", "HEADRACE_CACHE")}
    with (tmp_path if state == "read-only" else disk).joinpath("log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", *null_engine_arguments(), "--uds", str(socket),
             "--enable-log-requests", "--restart-engine", "2"],
            env={**os.environ, **ENVIRONMENT, **home},
            stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://x", timeout=30) as client:
            end_s = time.monotonic() + 90
            while not is_ready(client):
                assert time.monotonic() < end_s, "the server is not ready"
                assert server.poll() is None, "the server has ended"
                time.sleep(0.05)
            for _ in range(50):
                answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert answer.status_code == 200, answer.text
        server.terminate()
        assert server.wait(within(30)) == 0
    finally:
        server.kill()
        server.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("state", WRITES_FAIL)
def test_kernels_are_compiled_where_there_is_room_when_the_cache_has_none(
    disk: Path, tmp_path: Path, state: str
) -> None:
    WRITES_FAIL[state](disk)
    folder = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    program = f"""
from headrace import LLM, SamplingParams
llm = LLM({str(folder)!r}, dtype="float32", device="cpu", max_model_len=64)
print(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids)
llm.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300,
        env={**os.environ, **ENVIRONMENT, "HEADRACE_CACHE": str(disk / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing can be kept in" in done.stderr
    assert "the torch reference is" not in done.stderr


def test_a_profile_that_has_no_room_is_an_answer_with_the_cause(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    null: dict[str, Any] = {
        **{"model": "null", "distributed_executor_backend": "null_with_tokenizer:TokenizingNullExecutor"},
        **{"hf_overrides": {"vocab_size": 400}, "profiler_config": {"torch_profiler_dir": str(disk)}},
    }
    with LLM(in_process=True, **null) as llm:
        llm.start_profile()
        llm.generate([[5, 6]], SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
        fill(disk)
        with pytest.raises(HeadraceError, match=r"the profile .* cannot be written: No space left on device"):
            llm.stop_profile()
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) <= 3
        (disk / "filler").unlink()
        llm.start_profile("again")
        assert Path(llm.stop_profile()[0]).stat().st_size
