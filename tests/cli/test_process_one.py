"""Commands as process 1, as a container's command is: they wait for orphans, and no status is taken from its parent."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from containers import IN_CONTAINER, needs_containers
from patience import wait_until, within

pytestmark = needs_containers
NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")
ORPHANS = ("sh", "-c", '(sleep 0.01 &); (sleep 3 &); exec "$@"', "sh")
"""Runs a program that gets two orphans: one that ends before it starts, and a later one."""
SERVE = ("headrace", "serve", "null", *NULL, "--port", "0")


@contextmanager
def process_one(*command: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """The program by which the command runs as process 1, and process 1 itself."""
    program = str(Path(sys.executable).with_name(command[0]))
    with subprocess.Popen(
        [*IN_CONTAINER, *ORPHANS, program, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as outer:
        try:
            wait_until(lambda: bool(psutil.Process(outer.pid).children()), 30, "process 1 to start")
            (first,) = psutil.Process(outer.pid).children()
            yield outer, first
        finally:
            for each in psutil.Process(outer.pid).children() if outer.poll() is None else ():
                each.kill()  # and with it all of its processes


def wait_line(outer: subprocess.Popen[str], pattern: str) -> str:
    """Raises AssertionError if the program ends, or does not write such a line in time."""
    assert outer.stdout is not None
    seen = []
    too_long = threading.Timer(within(120), outer.kill)  # and with it process 1, which ends the output
    too_long.start()
    try:
        for line in outer.stdout:
            seen.append(line)
            if found := re.search(pattern, line):
                return found.group(1)
    finally:
        too_long.cancel()
    raise AssertionError(f"no {pattern!r}: {''.join(seen)}")


def zombies_of(first: psutil.Process) -> list[psutil.Process]:
    found = []
    for each in first.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.status() == psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def sleepers(first: psutil.Process) -> list[psutil.Process]:
    return [each for each in first.children() if each.name() == "sleep"]


@pytest.mark.parametrize(
    ("command", "ready"),
    [
        pytest.param(SERVE, r"ready: (\S+)/v1", marks=pytest.mark.system),
        pytest.param((*SERVE, "--api-server-count", "2"), r"ready: (\S+)/v1", marks=pytest.mark.system),
        (("engine-core", "null", *NULL), r"ready at (\S+)"),
        pytest.param(("headrace", "coordinator"), r"ready at (\S+)", marks=pytest.mark.system),
    ],
    ids=["serve", "two processes", "engine-core", "coordinator"],
)
def test_a_command_as_process_one_waits_for_orphans_and_drains_when_asked(command: tuple[str, ...], ready: str) -> None:
    with process_one(*command) as (outer, first):
        wait_line(outer, ready)
        wait_until(lambda: not sleepers(first) and not zombies_of(first), 60, "the end of all orphans")
        first.send_signal(signal.SIGTERM)
        told, _ = outer.communicate(timeout=60)
        assert outer.returncode == 0, told


def engines_of(first: psutil.Process) -> list[psutil.Process]:
    found = []
    for each in first.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "headrace.core.process.daemon" in each.cmdline():
                found.append(each)
    return found


def test_a_server_as_process_one_sees_how_its_engines_end() -> None:
    with process_one(*SERVE, "--restart-engine", "1") as (outer, first):
        wait_line(outer, r"ready: (\S+)/v1")
        (engine,) = engines_of(first)
        engine.kill()
        assert wait_line(outer, r"was killed by signal 9 \((\w+)\)") == "SIGKILL"
        wait_line(outer, r"(is connected again)")
        wait_until(lambda: not zombies_of(first), 60, "the end of all zombies")
        (engine,) = engines_of(first)
        engine.kill()
        told, _ = outer.communicate(timeout=60)
        assert outer.returncode == 70, told


@pytest.mark.system
def test_a_batch_as_process_one_ends_with_its_status(tmp_path: Path) -> None:
    body = {"model": "null", "prompt": [5, 6], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    with process_one("headrace", "run-batch", *files, "--model", "null", *NULL) as (outer, _):
        told, _ = outer.communicate(timeout=120)
        assert outer.returncode == 0, told
        assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200
    with process_one("headrace", "run-batch", *files, "--model", "/no/such/model") as (outer, _):
        outer.communicate(timeout=120)
        assert outer.returncode not in (0, 70)


def test_an_interrupt_reaches_the_command_of_process_one_once() -> None:
    with process_one(*SERVE) as (outer, first):
        wait_line(outer, r"ready: (\S+)/v1")
        first.send_signal(signal.SIGINT)
        told, _ = outer.communicate(timeout=60)
        assert told.count("stopping; a second signal does not wait") == 1
        assert "stopping at once" not in told
        assert outer.returncode == 0
