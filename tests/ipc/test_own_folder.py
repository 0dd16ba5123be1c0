"""Temporary folders end with their process, however it ends, and nobody else's are touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.ipc.process.own_folder import OwnFolder

PROGRAM = """
import time
from headrace.ipc.process.own_folder import OwnFolder
folder = OwnFolder("test")
(folder.path / "file").write_text("what somebody uploaded")
print(folder.path, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def process_with_a_folder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def make_older(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_a_killed_processs_folder_goes_with_the_next_and_a_living_ones_stays() -> None:
    with process_with_a_folder() as (killed, abandoned), process_with_a_folder() as (_, held):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        make_older(abandoned)
        make_older(held)
        with OwnFolder("test") as folder:
            assert folder.path.stat().st_mode & 0o777 == 0o700
            assert not abandoned.exists()
            assert (held / "file").exists()
        assert not folder.path.exists()


def test_folders_of_this_moment_and_of_other_kinds_and_links_stay(tmp_path: Path) -> None:
    new, other, pointed_at = tmp_path / "headrace-test-new", tmp_path / "headrace-others-1", tmp_path / "elsewhere"
    for each in (new, other, pointed_at):
        each.mkdir()
    link = tmp_path / "headrace-test-link"
    link.symlink_to(pointed_at)
    make_older(other)
    os.utime(link, (0, 0), follow_symlinks=False)
    OwnFolder("test").close()
    assert new.exists()
    assert other.exists()
    assert link.exists()
    make_older(new)
    OwnFolder("test").close()
    assert not new.exists()
