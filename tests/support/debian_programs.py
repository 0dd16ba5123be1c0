"""What tests use of Debian packages: the installed program, else the package's, unpacked into the user's cache folder
beside the demo model, where every clone finds it."""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from headrace.ipc.cache import cache_folder


def _release() -> str:
    """What packages are made for: those of one release need not run on another."""
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        found = {}
    return f"{found.get('ID', 'linux')}-{found.get('VERSION_ID', 'unknown')}-{platform.machine()}"


PLACE = cache_folder() / "debian" / _release()
"""As it is before any test has a cache folder of its own."""
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
        run = f'exec {shlex.quote(str(unpacked / path))} "$@"'
        text = f"#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(_library_path(unpacked))}\n{run}\n"
        with tempfile.NamedTemporaryFile("w", dir=unpacked, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o755)
        Path(file.name).rename(launcher)
    return str(launcher)


def _library_path(unpacked: Path) -> str:
    return ":".join(sorted({str(each.parent) for each in (unpacked / "usr/lib").rglob("lib*.so*")}))


def packaged(package: str, path: str) -> Path:
    """The file with this path in the package. Skips the test where the package cannot be had."""
    return _package(package, path) / path


def _installed(path: str) -> str | None:
    return shutil.which(Path(path).name, path="/usr/sbin:/usr/bin:/sbin:/bin")


def _package(package: str, path: str, with_dependencies: bool = False) -> Path:
    """The folder that it is unpacked in, by the first of those that need it at a time."""
    unpacked = PLACE / package
    if _is_whole(unpacked, path, with_dependencies):
        return unpacked
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
        with (PLACE / f"{package}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(unpacked, path, with_dependencies):
                _unpack(package, unpacked, with_dependencies)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{package} is neither installed nor to be had by apt-get download: {error}")
    return unpacked


def _is_whole(unpacked: Path, path: str, with_dependencies: bool) -> bool:
    """Whether the program is there; and the libraries, of which those that were installed when it was unpacked need not
    be installed where another container has the same cache folder."""
    if not (unpacked / path).is_file():
        return False
    if not with_dependencies or shutil.which("ldd") is None:
        return True
    environment = {**os.environ, "LD_LIBRARY_PATH": _library_path(unpacked)}
    return "not found" not in _run("ldd", str(unpacked / path), environment=environment).stdout


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


def _run(
    *command: str, cwd: str | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
