"""What tests use of Debian packages: the installed program, else the package's, unpacked into the environment."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PLACE = Path(sys.prefix) / "debian"
LAUNCHER = "launch"
"""Within an unpacked package, what runs its program with its own libraries."""
_LIMIT_S = 300.0


def program(package: str, path: str) -> str:
    """The program with this path in the package. Skips the test where it cannot be had."""
    return _installed(path) or str(packaged(package, path))


def program_with_libraries(package: str, path: str) -> str:
    """As program, for one that needs libraries, which come with it as far as they are not installed."""
    installed = _installed(path)
    if installed:
        return installed
    unpacked = _package(package, path, with_dependencies=True)
    launcher = unpacked / LAUNCHER
    if not launcher.exists():
        folders = sorted({str(each.parent) for each in (unpacked / "usr/lib").rglob("lib*.so*")})
        run = f'exec {shlex.quote(str(unpacked / path))} "$@"'
        text = f"#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(':'.join(folders))}\n{run}\n"
        with tempfile.NamedTemporaryFile("w", dir=unpacked, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o755)
        Path(file.name).rename(launcher)
    return str(launcher)


def packaged(package: str, path: str) -> Path:
    """The file with this path in the package. Skips the test where the package cannot be had."""
    return _package(package, path) / path


def _installed(path: str) -> str | None:
    return shutil.which(Path(path).name, path="/usr/sbin:/usr/bin:/sbin:/bin")


def _package(package: str, path: str, with_dependencies: bool = False) -> Path:
    """The folder that it is unpacked in, by the first of those that need it at a time."""
    unpacked = PLACE / package
    if (unpacked / path).is_file():
        return unpacked
    PLACE.mkdir(exist_ok=True)
    with (PLACE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (unpacked / path).is_file():
            try:
                _unpack(package, unpacked, with_dependencies)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{package} is neither installed nor to be had by apt-get download: {error}")
    return unpacked


def _unpack(package: str, unpacked: Path, with_dependencies: bool) -> None:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        if not _downloaded(package, folder, with_dependencies):
            _run("apt-get", "update").check_returncode()
            if not _downloaded(package, folder, with_dependencies):
                raise OSError("there is no such package")
        whole = Path(folder) / "unpacked"
        for file in Path(folder).glob("*.deb"):
            _run("dpkg", "-x", str(file), str(whole)).check_returncode()
        shutil.rmtree(unpacked, ignore_errors=True)
        whole.rename(unpacked)


def _downloaded(package: str, folder: str, with_dependencies: bool) -> bool:
    names = [package]
    if with_dependencies:
        simulated = _run("apt-get", "install", "--simulate", "--no-install-recommends", package)
        lines = [line.split() for line in simulated.stdout.splitlines()]
        names = [words[1] for words in lines if words[:1] == ["Inst"]]
    return bool(names) and _run("apt-get", "download", *names, cwd=folder).returncode == 0


def _run(*command: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
