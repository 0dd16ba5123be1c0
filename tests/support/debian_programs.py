"""What tests use of Debian packages: the installed program, else the package's, unpacked into the environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PLACE = Path(sys.prefix) / "debian"
_LIMIT_S = 120.0


def program(package: str, path: str) -> str:
    """The program with this path in the package. Skips the test where it cannot be had."""
    installed = shutil.which(Path(path).name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    return installed or str(packaged(package, path))


def packaged(package: str, path: str) -> Path:
    """The file with this path in the package. Skips the test where the package cannot be had."""
    unpacked = PLACE / package
    if not (unpacked / path).is_file():
        try:
            _unpack(package, unpacked)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{package} is neither installed nor to be had by apt-get download: {error}")
    return unpacked / path


def _unpack(package: str, unpacked: Path) -> None:
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        if not _downloaded(package, folder):
            subprocess.run(["apt-get", "update"], capture_output=True, timeout=_LIMIT_S, check=True)
            if not _downloaded(package, folder):
                raise OSError("there is no such package")
        (file,) = Path(folder).glob("*.deb")
        whole = Path(folder) / "unpacked"
        subprocess.run(["dpkg", "-x", file, whole], capture_output=True, timeout=_LIMIT_S, check=True)
        whole.rename(unpacked)


def _downloaded(package: str, folder: str) -> bool:
    command = ["apt-get", "download", package]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_LIMIT_S, check=False)
    return done.returncode == 0
