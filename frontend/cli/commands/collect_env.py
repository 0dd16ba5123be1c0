"""Print versions, machine and settings, for a bug report.

Values of environment variables that may be secret are not shown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headrace
from headrace.ipc.cache import cache_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    report = collect()
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, entries in report.items():
        print(f"{section}:")
        width = max((len(name) for name in entries), default=0)
        for name, value in entries.items():
            print(f"  {name + ':':<{width + 1}} {_text(value)}")
        if not entries:
            print("  none")
    return 0


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


COMMAND_TIMEOUT_S = 10.0
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf", "huggingface-hub", "triton"),
    *("msgspec", "pyzmq", "uvloop", "jinja2", "psutil", "xxhash", "starlette", "uvicorn", "httptools"),
)
INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
"""Instruction sets that kernels and libraries choose by, as /proc/cpuinfo names them."""
_RELEVANT = re.compile(
    r"(HEADRACE|VLLM|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|OMP|KMP|MKL|OPENBLAS|GOMP|HF|HUGGINGFACE|TRANSFORMERS"
    r"|TOKENIZERS|MALLOC|LD|PYTHON)_\w+|CXX|CC|XDG_RUNTIME_DIR|XDG_CACHE_HOME|TMPDIR|VIRTUAL_ENV|PYTHONPATH"
    r"|PYTHONHASHSEED|LANG|LC_ALL"
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(sk-|hf_|ghp_|gho_|github_pat_|xox[bp]-|AKIA|eyJ)[\w-]{6,}|://[^/\s]*@")
"""Matches keys of common services by their prefixes, and URLs that contain a password."""
HIDDEN = "(hidden)"


def collect() -> dict[str, dict[str, Any]]:
    """Entries by section and name. A value is a text, a number, a list of texts, or None if unknown. Names of sizes
    contain `bytes`."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "cgroup": _cgroup(),
        "compiler": _compiler(),
        "kernel cache": _kernel_cache(),
        "GPU": gpus(),
        "environment": shown_environment(os.environ),
    }


def shown_environment(variables: Any) -> dict[str, str]:
    """The relevant environment variables; the value is hidden if the name or the value looks like a secret."""
    return {
        name: HIDDEN if _SECRET.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(variables.items())
        if _RELEVANT.fullmatch(name)
    }


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {
        "headrace": headrace.__version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.python_compiler()})",
        "system": platform.platform(),
        "distribution": _distribution(),
    }
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _machine() -> dict[str, Any]:
    import psutil

    text = _read("/proc/cpuinfo") or ""
    memory = psutil.virtual_memory()
    return {
        "CPU": _field(text, "model name", "Model", "Hardware") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "hardware threads": psutil.cpu_count(),
        "usable threads": len(os.sched_getaffinity(0)),
        "instruction sets": instruction_sets(text),
        "memory bytes": memory.total,
        "available memory bytes": memory.available,
        "huge pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "NUMA nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "shared memory bytes": _disk_bytes("/dev/shm"),
        "Python executable": sys.executable,
    }


def instruction_sets(cpuinfo: str) -> list[str]:
    """The members of INSTRUCTION_SETS that the text of /proc/cpuinfo lists."""
    listed = (_field(cpuinfo, "flags", "Features") or "").split()
    return [name for name in INSTRUCTION_SETS if name in listed]


def _cgroup() -> dict[str, Any]:
    """The limits of this process's control group, version 2 or 1; `none` if there is no limit."""
    path = next(
        (line.partition("::")[2] for line in (_read("/proc/self/cgroup") or "").splitlines() if "::" in line), ""
    )
    root = Path("/sys/fs/cgroup")
    # In a container the path may be the host's, which does not exist here.
    own = next((each for each in (root / path.lstrip("/"), root) if (each / "cpu.max").exists()), None)
    if own is not None:
        quota = cpu_limit(_read(own / "cpu.max"))
        memory = (_read(own / "memory.max") or "").strip()
    else:
        quota = cpu_limit(f"{_read(root / 'cpu/cpu.cfs_quota_us') or ''} {_read(root / 'cpu/cpu.cfs_period_us') or ''}")
        memory = (_read(root / "memory/memory.limit_in_bytes") or "").strip()
    return {
        "CPU limit in cores": "none" if quota is None else quota,
        "memory limit bytes": int(memory) if memory.isdigit() and int(memory) < 1 << 62 else "none",
    }


def cpu_limit(text: str | None) -> float | None:
    """Cores from `quota period`, both in microseconds; None for no limit (`max`, or -1)."""
    parts = (text or "").split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None
    return int(parts[0]) / int(parts[1])


def _compiler() -> dict[str, Any]:
    from headrace.kernels.cpu.compiler import BuildError, find_compiler

    try:
        command = find_compiler()
    except BuildError as error:
        return {"command": str(error)}
    version = _output([*command, "--version"])
    return {"command": shlex.join(command), "version": version.splitlines()[0] if version else None}


def _kernel_cache() -> dict[str, Any]:
    folder = cache_folder() / "kernels"
    libraries = sorted(folder.glob("*.so"), key=_changed_s)
    return {
        "folder": str(folder),
        "writable": os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK),
        "libraries": [f"{library.name} ({_size(library)} bytes)" for library in libraries[-5:]],
        "number of libraries": len(libraries),
    }


def gpus() -> dict[str, Any]:
    """The GPUs that the NVIDIA driver reports (NVML), or the reason why there is none."""
    import pynvml  # of nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"none": f"the NVIDIA driver's library says: {error}"}
    try:
        driver = _as_text(pynvml.nvmlSystemGetDriverVersion())
        gpus = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
            gpus[str(index)] = (
                f"{_as_text(pynvml.nvmlDeviceGetName(gpu))}, {pynvml.nvmlDeviceGetMemoryInfo(gpu).total >> 20} MiB, "
                f"compute capability {major}.{minor}, driver {driver}"
            )
        return gpus or {"none": f"the NVIDIA driver {driver} has no GPU"}
    except pynvml.NVMLError as error:
        return {"none": f"the NVIDIA driver's library says: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _as_text(name: str | bytes) -> str:
    """The name as text; older versions of the library return bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _output(command: Sequence[str]) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _field(text: str, *names: str) -> str | None:
    """The first `name : value` line of any of these names."""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in names:
            return value.strip()
    return None


def _chosen(text: str | None) -> str | None:
    """The value in brackets: madvise for `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match.group(1) if match else None


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _disk_bytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
