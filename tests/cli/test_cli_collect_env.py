"""`headrace collect-env`: complete without torch, and silent about secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pynvml
import pytest

import headrace
from headrace.frontend.cli.commands.collect_env import HIDDEN, collect, cpu_limit, instruction_sets, shown_environment
from headrace.frontend.cli.main import main


def test_the_report_is_complete_and_loads_nothing_heavy(private_cache: Path) -> None:
    (private_cache / "kernels").mkdir(parents=True)
    (private_cache / "kernels" / "cpu-abc.so").write_bytes(b"1234")
    code = (
        "import sys\nfrom headrace.frontend.cli.main import main\nstatus = main(['collect-env', '--json'])\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules], file=sys.stderr)\nsys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr == "[]\n"
    report = json.loads(result.stdout)
    assert report["versions"]["headrace"] == headrace.__version__
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["machine"]["usable threads"] == len(os.sched_getaffinity(0))
    assert report["machine"]["memory bytes"] > report["machine"]["available memory bytes"] > 0
    assert report["kernel cache"]["libraries"] == ["cpu-abc.so (4 bytes)"]
    assert report["environment"]["HEADRACE_CACHE"] == str(private_cache)
    assert all(key.isdigit() or (key == "none" and "NVIDIA driver" in text) for key, text in report["GPU"].items())
    assert report["GPU"], "the GPUs, or why there are none"
    assert set(report) == {"versions", "machine", "cgroup", "compiler", "kernel cache", "GPU", "environment"}


def test_as_text_every_section_has_its_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "do-not-show")
    monkeypatch.setenv("CXX", "no-such-compiler --really")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for heading in ("versions:", "machine:", "cgroup:", "compiler:", "kernel cache:", "GPU:", "environment:"):
        assert f"\n{heading}\n" in "\n" + text
    assert "do-not-show" not in text
    assert "no-such-compiler --really" in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "abc", HIDDEN),
        ("HEADRACE_API_KEY", "abc", HIDDEN),
        ("NCCL_PASSWORD", "abc", HIDDEN),
        ("HF_ENDPOINT", "https://user:word@example.com", HIDDEN),
        ("HEADRACE_NOTE", "sk-abcdef012345", HIDDEN),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("OMP_NUM_THREADS", "2", "2"),
        ("SOME_OTHER", "abc", None),
        ("AWS_SECRET_ACCESS_KEY", "abc", None),
    ],
)
def test_secrets_are_hidden_and_strangers_left_out(name: str, value: str, shown: str | None) -> None:
    assert shown_environment({name: value}) == ({} if shown is None else {name: shown})


def test_instruction_sets_are_those_that_the_cpu_lists() -> None:
    x86 = "processor : 0\nmodel name : A CPU\nflags\t\t: fpu sse4_2 avx2 avx512f rdseed\n"
    assert instruction_sets(x86) == ["sse4_2", "avx2", "avx512f"]
    assert instruction_sets("Features : fp asimd bf16\n") == ["asimd", "bf16"]
    assert instruction_sets("") == []


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("-1\n 100000\n", None), ("", None)]
)
def test_a_cpu_limit_is_quota_over_period(text: str, cores: float | None) -> None:
    assert cpu_limit(text) == cores


def test_gpus_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("NVIDIA H200", 143771, (9, 0)), ("NVIDIA L4", 23034, (8, 9))]
    for name, answer in (
        ("nvmlInit", lambda: None),
        ("nvmlShutdown", lambda: None),
        ("nvmlSystemGetDriverVersion", lambda: "570.86.15"),
        ("nvmlDeviceGetCount", lambda: len(found)),
        ("nvmlDeviceGetHandleByIndex", lambda index: found[index]),
        ("nvmlDeviceGetName", lambda gpu: gpu[0]),
        ("nvmlDeviceGetMemoryInfo", lambda gpu: types.SimpleNamespace(total=gpu[1] << 20)),
        ("nvmlDeviceGetCudaComputeCapability", lambda gpu: gpu[2]),
    ):
        monkeypatch.setattr(pynvml, name, answer)
    assert collect()["GPU"] == {
        "0": "NVIDIA H200, 143771 MiB, compute capability 9.0, driver 570.86.15",
        "1": "NVIDIA L4, 23034 MiB, compute capability 8.9, driver 570.86.15",
    }


def test_why_there_is_no_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", not_found)
    assert collect()["GPU"] == {"none": "the NVIDIA driver's library says: NVML Shared Library Not Found"}
