"""Check this machine, and say what would fail or be slow, and why.

Each line is `ok`, `slow` or `fails`. The exit status is 1 if something fails. Nothing is started or compiled.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

DEFAULT_PORT = 8000
LITTLE_MEMORY_BYTES = 2 << 30
LITTLE_DISK_BYTES = 1 << 30
LITTLE_SHARED_BYTES = 64 << 20
FEW_FILES = 4096
GIB = 1 << 30


class Finding(NamedTuple):
    subject: str
    state: Literal["ok", "slow", "fails"]
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="The port that a server would use (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of lines")


def run(arguments: argparse.Namespace) -> int:
    found = list(findings(arguments.port))
    if arguments.json:
        import json

        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        width = max(len(finding.subject) for finding in found)
        for finding in found:
            print(f"{finding.state:<6} {finding.subject:<{width}}  {finding.text}")
    return int(any(finding.state == "fails" for finding in found))


def findings(port: int) -> Iterator[Finding]:
    """Imports no torch."""
    yield from _installed()
    yield _instructions()
    yield from _kernels()
    yield _cores()
    yield from _memory()
    yield from _folders()
    yield from _gpu()
    yield _port(port)
    yield _files()


def _installed() -> Iterator[Finding]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import headrace
    from headrace.core.process.installed import client_alone

    yield Finding("headrace", "ok", f"{headrace.__version__} on Python {platform.python_version()}")
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors", "gguf"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("engine", "fails", client_alone(", ".join(missing)))
    else:
        yield Finding("engine", "ok", ", ".join(found))


def _instructions() -> Finding:
    import platform

    from headrace.kernels.cpu.build import cpu_features
    from headrace.kernels.cpu.compiler import levels

    has = cpu_features()
    best = next((name for name, level in levels().items() if level.features and level.features <= has), None)
    if platform.machine() != "x86_64":
        return Finding("instructions", "ok", f"{platform.machine()}, as the compiler finds it")
    if best is None:
        return Finding(
            "instructions", "slow", "this CPU has no AVX2: each instruction computes 4 numbers instead of 8 or 16"
        )
    if best == "amx":
        return Finding("instructions", "ok", f"{best}: weights in bfloat16 and int8 are multiplied in tile registers")
    if best == "avx512_bf16":
        return Finding("instructions", "ok", f"{best}: weights in bfloat16 are multiplied as they are")
    return Finding(
        "instructions", "ok", f"{best}; without avx512_bf16, prompts of bfloat16 models are computed in float32"
    )


def _kernels() -> Iterator[Finding]:
    from headrace.kernels.cpu.build import find
    from headrace.kernels.cpu.compiler import BuildError, find_compiler
    from headrace.kernels.cpu.units import CORE, LIBRARIES

    try:
        compiler, why_none = " ".join(find_compiler()), ""
    except BuildError as error:
        compiler, why_none = "", str(error)
    missing = []
    for part in LIBRARIES:
        if (library := find(part=part)) is None:
            missing.append(part)
        elif part == CORE:
            yield Finding("kernels", "ok", library.path)
    if not missing:
        yield Finding("compiler", "ok", f"{compiler or 'none'}; none is needed, as all kernels are compiled")
    elif compiler:
        text = (
            f"{compiler} compiles {', '.join(missing)} when a model needs them first, which takes up to half a minute"
        )
        yield Finding("compiler", "ok", text)
    else:
        lacks = "and torch's operations compute instead, many times slower" if CORE in missing else "for such weights"
        yield Finding("compiler", "slow", f"the kernels {', '.join(missing)} are missing, {lacks}: {why_none}")


def _cores() -> Finding:
    from headrace.ipc.process.host import usable_cores

    usable, all_cores = usable_cores(), os.cpu_count() or 1
    text = f"{usable} of {all_cores} may be used"
    if usable < all_cores:
        text += " (affinity, or the CPU quota of the control group)"
    load, _, _ = os.getloadavg()
    if load > usable:
        return Finding("cores", "slow", f"{text}, and other programs keep {load:.1f} busy")
    return Finding("cores", "ok", text)


def _memory() -> Iterator[Finding]:
    from headrace.ipc.process.host import host_memory

    memory = host_memory()
    text = f"{memory.available_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB are free"
    if memory.available_bytes < LITTLE_MEMORY_BYTES:
        yield Finding("memory", "slow", f"{text}: a model's weights and its cache must fit, or the start is refused")
    else:
        yield Finding("memory", "ok", f"{text}, for the weights and the KV cache")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists() and "[never]" in pages.read_text():
        yield Finding("huge pages", "slow", f"{pages} is never: large weights are read a few percent slower")
    shared = _free_bytes("/dev/shm")
    if shared is None or shared < LITTLE_SHARED_BYTES:
        size = "missing" if shared is None else f"{shared >> 20} MiB free"
        yield Finding("/dev/shm", "fails", f"{size}: several ranks share memory there (docker run --shm-size=1g)")


def _folders() -> Iterator[Finding]:
    from headrace.ipc.cache import cache_folder
    from headrace.ipc.failure import HeadraceError
    from headrace.ipc.process.runtime_directory import runtime_directory
    from headrace.ipc.process.trusted_files import why_untrusted

    try:
        cache = cache_folder()
        runtime = runtime_directory()
    except HeadraceError as error:
        yield Finding("folders", "fails", str(error))
        return
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    for subject, folder, is_for, fails in (
        ("cache", cache, "compiled kernels, tokenizers and the demo model", "slow"),
        ("hub cache", hub.expanduser(), "downloaded models", "fails"),
        ("sockets", runtime, "engines' addresses", "fails"),
    ):
        free = _free_bytes(folder)
        if not _is_writable(folder):
            yield Finding(subject, fails, f"{folder} cannot be written, and is for {is_for}")  # type: ignore[arg-type]
        elif reason := why_untrusted(folder):
            yield Finding(subject, "slow", f"{reason}; {is_for} are not kept")
        elif free is not None and free < LITTLE_DISK_BYTES:
            yield Finding(subject, "slow", f"{folder} has {free >> 20} MiB free, for {is_for}")
        else:
            room = "" if free is None else f", {free / GIB:.0f} GiB free"
            yield Finding(subject, "ok", f"{folder}{room}")


def _gpu() -> Iterator[Finding]:
    from headrace.frontend.cli.commands.collect_env import gpus

    found = gpus()
    if reason := found.get("none"):
        yield Finding("GPU", "ok", f"none, so that models run on the CPU ({reason})")
        return
    cuda = _cuda_of_torch()
    for index, text in found.items():
        yield Finding(f"GPU {index}", "ok" if cuda else "slow", text)
    if not cuda:
        yield Finding("torch", "slow", "it is built without CUDA, so that no GPU is used: install PyPI's build")


def _cuda_of_torch() -> str | None:
    """The version of CUDA that torch was built for, without importing it; None for a build without."""
    import importlib.util
    import re

    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return match and match[1]


def _port(port: int) -> Finding:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding("port", "fails", f"{port} cannot be used ({error.strerror}): serve --port names another")
    return Finding("port", "ok", f"{port} is free")


def _files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} may be open at once (ulimit -n; at most {hard})"
    if hard < FEW_FILES:
        return Finding("files", "slow", f"{text}, which bounds the number of connections")
    return Finding("files", "ok", text)


def _is_writable(folder: Path) -> bool:
    """Whether the folder can be written, or made."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _free_bytes(folder: str | Path) -> int | None:
    import shutil

    there = next((each for each in (Path(folder), *Path(folder).parents) if each.exists()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None
