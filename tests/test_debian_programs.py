"""Programs of Debian packages that tests use: unpacked once for all clones, and anew where libraries are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import debian_programs
import pytest

PACKAGE, PATH = "headrace-greets", "usr/bin/headrace-greets"
APT_GET = """#!/bin/sh
echo "$1" >> {log}
case "$1" in
  install) echo "Inst {package} (1 here)";;
  download) cp {package} .;;
esac
"""


@pytest.fixture
def apt_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What apt-get, which has this package alone, was asked for."""
    if not (shutil.which("dpkg-deb") and shutil.which("cc") and shutil.which("ldd")):
        pytest.skip("needs dpkg-deb, cc and ldd")
    log, root = tmp_path / "log", tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        f"Package: {PACKAGE}\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <no@localhost>\nDescription: greets\n"
    )
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/lib").mkdir()
    library = root / "usr/lib/libheadracegreets.so"
    for command, source in (
        (["-shared", "-o", str(library)], "int status(void) { return 7; }"),
        (["-o", str(root / PATH), "-L", str(library.parent)], "int status(void); int main(void) { return status(); }"),
    ):
        linked = ["-lheadracegreets"] if "-shared" not in command else []
        subprocess.run(["cc", "-x", "c", "-", *command, *linked], input=source, text=True, check=True)
    deb = tmp_path / f"{PACKAGE}.deb"
    subprocess.run(["dpkg-deb", "--build", str(root), str(deb)], check=True, capture_output=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text(APT_GET.format(log=log, package=deb))
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setattr(debian_programs, "PLACE", tmp_path / "cache" / "debian")
    return log


def status_of(program: str) -> int:
    return subprocess.run([program], check=False).returncode


def test_a_clone_finds_what_another_one_unpacked(apt_log: Path) -> None:
    first = debian_programs.program_with_libraries(PACKAGE, PATH)
    assert status_of(first) == 7
    asked = apt_log.read_text()
    assert debian_programs.program_with_libraries(PACKAGE, PATH) == first
    assert apt_log.read_text() == asked


def test_a_package_whose_libraries_are_not_all_here_is_unpacked_anew(apt_log: Path) -> None:
    """As one is that was unpacked in a container in which some of them were installed."""
    program = debian_programs.program_with_libraries(PACKAGE, PATH)
    for library in debian_programs.PLACE.rglob("libheadracegreets.so"):
        library.unlink()
    assert status_of(program) != 7
    assert status_of(debian_programs.program_with_libraries(PACKAGE, PATH)) == 7


def test_they_are_kept_outside_of_the_environment() -> None:
    assert not debian_programs.PLACE.is_relative_to(sys.prefix)
