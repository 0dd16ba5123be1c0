"""A parent's waits for its child end: it is never executed, does not read, or sends half of a message."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import still_alive
from thinned import every
from tqdm import tqdm

from headrace.core.options.engine_options import Options
from headrace.core.process import early
from headrace.core.process.child import Child, ChildOptions, start_coordinator, start_engine
from headrace.ipc.failure import EngineStartError
from headrace.ipc.messages import SCHEMA_HASH, Ready, Start
from headrace.ipc.process.runtime_directory import AddressError
from headrace.ipc.process.runtime_directory import runtime_directory as runtime_directory_now

NULL: dict[str, Any] = {"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "model": "null"}
SLEEPER = ["-c", "import time; time.sleep(60)"]
HALF_A_MESSAGE = """
import os, sys, time
fd = int(sys.argv[1])
os.write(fd, (1000).to_bytes(4, "little") + b"half")
print("still here", flush=True)
time.sleep(60)
"""


def start_message(**options: Any) -> Start:
    return Start(schema_hash=SCHEMA_HASH, options=options, bind="")


def test_a_program_whose_execution_hangs_is_given_up_at_the_starts_deadline(monkeypatch):
    mount_is_back = threading.Event()
    popen = subprocess.Popen

    def hang(*arguments: Any, **keywords: Any) -> Any:  # as execve of a program on a dead mount does
        mount_is_back.wait(30)
        process = popen(*arguments, **keywords)
        started.append(process)
        return process

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", hang)
    with pytest.raises(EngineStartError, match=r"sleeper could not be started: executing .* within 0\.2 s"):
        Child("sleeper", SLEEPER, start_message(), ChildOptions(startup_timeout_s=0.2))
    mount_is_back.set()
    deadline_s = time.monotonic() + 20
    while not started or started[0].poll() is None:  # one that comes late serves nobody
        assert time.monotonic() < deadline_s, "what was started late lives on"
        time.sleep(0.01)


def test_a_child_that_does_not_read_what_it_is_to_start_with_is_ended_at_the_deadline():
    options = ChildOptions(startup_timeout_s=0.3)
    with pytest.raises(EngineStartError, match="did not read what it is to start with") as raised:
        Child("sleeper", SLEEPER, start_message(model="x" * 4_000_000), options)
    assert raised.value.failure is not None
    with pytest.raises(ProcessLookupError):
        os.kill(raised.value.failure.pid, 0)


LOADS = """
import sys
from headrace.ipc.messages import Progress, Ready, Start, Stop
from headrace.ipc.transport.channel import Channel
from headrace.ipc.wait import Deadline
channel = Channel.inherited(int(sys.argv[1]), Start | Stop)
channel.receive(Deadline(30.0))
print("a line of the log", flush=True)
channel.send(Progress(phase="load", seconds=0.0, read_bytes=1, total_bytes=2))
channel.send(Progress(phase="allocate", seconds=0.0))
channel.send(Ready(address="", startup_s={}))
channel.receive(Deadline(None))
"""


class Unwritable(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("of the program's own stream")])
def test_a_bar_that_nobody_reads_and_a_listener_that_fails_hide_neither_start_nor_end(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As with `script.py 2>&1 | head -1`: the start was waited for until its time-out."""

    def fail(message: Any) -> None:
        raise ValueError("no such message")

    monkeypatch.setattr(sys, "stderr", Unwritable(error))
    child = Child("loading", ["-c", LOADS], start_message(), ChildOptions(shows_loading=True, on_message=fail))
    assert child.wait_ready(60) == Ready(address="", startup_s={})
    os.kill(child.pid, signal.SIGKILL)
    ended = threading.Event()
    child.on_exit(lambda failure: ended.set())
    assert ended.wait(30)
    lock = tqdm.get_lock()
    shown = threading.Thread(target=lambda: (lock.acquire(), lock.release()), daemon=True)
    shown.start()
    shown.join(30)
    assert not shown.is_alive(), "other threads wait for ever to show a bar"


def test_the_signal_of_a_file_that_lost_its_end_is_explained() -> None:
    child = Child("reading", ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"], start_message())
    with pytest.raises(EngineStartError, match=r"signal 7 \(SIGBUS\); .* a checkpoint that was written over"):
        child.wait_ready(60)


def test_a_child_that_hangs_in_mid_message_is_still_watched():
    child = Child("halting", ["-c", HALF_A_MESSAGE], start_message())
    deadline_s = time.monotonic() + 20
    while "still here" not in child.log_tail:
        assert time.monotonic() < deadline_s, "its log is not relayed"
        time.sleep(0.01)
    child.kill()
    assert not child.alive


@pytest.mark.parametrize("how", every(3, ["open to others", "a file", "below a file"]))
def test_a_runtime_directory_that_cannot_be_used_is_told_and_the_childs_end_is_still_heard(
    how: str, runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start_engine(Options(**NULL))
    child.wait_ready(60)
    directory = runtime_directory
    if how == "open to others":
        directory.chmod(0o755)
    else:
        directory = directory / "file"
        directory.touch()
        directory = directory / "below" if how == "below a file" else directory
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(directory))
    os.kill(child.pid, signal.SIGKILL)
    heard = threading.Event()
    child.on_exit(lambda failure: heard.set())
    assert heard.wait(60), "the watching thread ended before it could tell"
    with pytest.raises(AddressError, match="directory"):
        runtime_directory_now()
    second, ended = start_engine(Options(**NULL)), threading.Event()
    with pytest.raises(EngineStartError, match="directory"):
        second.wait_ready(60)
    second.on_exit(lambda failure: ended.set())
    assert ended.wait(60), "what watches it would still look for its sockets while the folder is removed"


def test_a_killed_coordinator_leaves_no_socket_though_its_address_has_the_parents_number(
    runtime_directory: Path,
) -> None:
    coordinator = start_coordinator()
    coordinator.wait_ready()
    assert len(list(runtime_directory.glob("coordinator-*.sock"))) == 1
    coordinator.kill()
    assert not list(runtime_directory.iterdir())


def test_the_first_engine_is_the_program_that_was_started_early_if_nothing_has_changed(monkeypatch):
    early.start_early()
    started = early._early[0].process
    first, second = start_engine(Options(**NULL)), start_engine(Options(**NULL))
    try:
        assert first.pid == started.pid != second.pid
        assert first.wait_ready(60).address != second.wait_ready(60).address
    finally:
        first.kill()
        second.kill()
    early.start_early()
    started = early._early[0].process
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    changed = start_engine(Options(**NULL))
    try:
        assert started.poll() == -signal.SIGKILL
        assert changed.pid != started.pid
    finally:
        changed.kill()


def test_a_program_that_was_started_early_and_is_not_needed_is_ended():
    early.start_early()
    started = early._early[0].process
    coordinator = start_coordinator()
    coordinator.kill()
    assert started.poll() is None
    early.drop_early()
    assert started.poll() == -signal.SIGKILL
    early.drop_early()


def test_a_program_that_was_started_early_ends_with_its_parent():
    script = (
        "import os, psutil; from headrace.core.process import early; early.start_early(); "
        "child = psutil.Process(early._early[0].process.pid); print(child.pid, child.create_time(), flush=True); "
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    pid, began_s = done.stdout.split()
    try:
        child = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return
    if child.create_time() == float(began_s):
        assert not still_alive([child], 30)
