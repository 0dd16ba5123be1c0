"""What every test gets: the demo model when asked for, a cache folder of its own, and a check for stray processes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a script's background job is started, and as all its children would then be: none would notice Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
# How fast a busy machine makes examples says nothing of what is tested.

LEFTOVER_GRACE_S = 5.0
"""How long a test's processes may take to end after it: what the design promises after a death."""


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file in the user's cache, fetched when missing. Mark such tests `demo_model`.

    Fails rather than skips when it cannot be had: the sentence says how to get it.
    """
    from headrace.executor.checkpoints.demo_model import fetch_demo_model

    return fetch_demo_model()


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for this process and the ones it starts."""
    folder = tmp_path / "headrace-cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for sockets; short, for a Unix socket's path is at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_process_left_over() -> Iterator[None]:
    """Fails a test that leaves a child process behind, and ends it so that the next test is not blamed."""
    before = _descendants()
    yield
    # What a server of a fixture starts for itself, such as the process that tries grammars, ends with that server.
    left = {process for process in _descendants() - before if _parent(process) not in before}
    _, alive = psutil.wait_procs(left, timeout=LEFTOVER_GRACE_S)
    names = [f"{process.pid} {_command(process)}" for process in alive]
    for process in alive:
        process.kill()
    assert not names, f"processes left over {LEFTOVER_GRACE_S:g} s after the test: {names}"


def _descendants() -> set[psutil.Process]:
    return {process for process in psutil.Process(os.getpid()).children(recursive=True) if _is_alive(process)}


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"
