"""`headrace doctor`: what it finds, said in a line each, without torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.frontend.cli.commands import doctor
from headrace.frontend.cli.main import main
from headrace.kernels.cpu import build


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    main(["doctor", "--json", *(arguments or ("--port", "0"))])
    return {each["subject"]: (each["state"], each["text"]) for each in json.loads(capsys.readouterr().out)}


def test_it_loads_nothing_heavy_compiles_nothing_and_tells_by_its_status(private_cache: Path) -> None:
    code = (
        "import sys\nfrom headrace.frontend.cli.main import main\nstatus = main(['doctor', '--port', '0'])\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules], file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "[]\n"
    states = [line.split()[0] for line in done.stdout.splitlines()]
    assert set(states) <= {"ok", "slow", "fails"}
    assert done.returncode == int("fails" in states)
    assert not list(private_cache.rglob("*.so"))


def test_a_port_in_use_fails_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        state, text = findings(capsys, "--port", str(port))["port"]
    assert (state, text) == ("fails", f"{port} cannot be used (Address already in use): serve --port names another")
    assert main(["doctor", "--port", str(port)]) in (0, 1)


def test_without_compiler_and_kernels_it_says_that_torch_computes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, private_cache: Path
) -> None:
    monkeypatch.setattr(build, "SHARED_CACHE", private_cache)
    monkeypatch.setenv("CXX", "/nonexistent")
    state, text = findings(capsys)["compiler"]
    assert state == "slow"
    assert text.startswith("the kernels core, packed, grouped are missing, and torch's operations compute instead")
    assert "CXX='/nonexistent' was not found" in text


@pytest.mark.parametrize(
    ("lacks", "state", "said"),
    [
        ((), "ok", "amx: "),
        (("amx_tile",), "ok", "avx512_bf16: "),
        (("amx_tile", "avx512f"), "ok", "avx2; without"),
        (("amx_tile", "avx2"), "slow", "this CPU has no AVX2"),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="CPUs of x86-64")
def test_the_instruction_set_is_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], state: str, said: str
) -> None:
    from headrace.kernels.cpu.compiler import levels

    monkeypatch.setattr(build, "cpu_features", lambda: levels()["amx"].features - set(lacks))
    found = findings(capsys)["instructions"]
    assert found[0] == state
    assert found[1].startswith(said)


def test_folders_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(in_the_way / "cache"))
    monkeypatch.setenv("HF_HOME", str(in_the_way))
    found = findings(capsys)
    assert found["cache"] == (
        "slow",
        f"{in_the_way}/cache cannot be written, and is for compiled kernels, tokenizers and the demo model",
    )
    assert found["hub cache"][0] == "fails"
    assert main(["doctor", "--port", "0"]) == 1


def test_a_client_alone_is_told_what_lacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    version = importlib.metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_torch)
    state, text = findings(capsys)["engine"]
    assert state == "fails"
    assert "client alone, without torch;" in text


def test_memory_and_cores_are_judged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.ipc.process import host

    monkeypatch.setattr(host, "host_memory", lambda: host.HostMemory(4 << 30, 1 << 30))
    monkeypatch.setattr(host, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    found = findings(capsys)
    assert found["memory"][0] == found["cores"][0] == "slow"
    assert found["memory"][1].startswith("1.0 of 4.0 GiB are free: a model's weights and its cache must fit")
    assert found["cores"][1].endswith("other programs keep 3.0 busy")


def test_a_build_of_torch_is_read_without_importing_it() -> None:
    assert doctor._cuda_of_torch() is None or "torch" not in sys.modules
