"""A signal that a program is started to ignore stays ignored: `nohup headrace serve &` outlives the logout."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from thinned import every

from headrace import connect

NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")


IGNORING = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
"""Runs a program that ignores both."""


def ignored_by(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize(
    ("command", "ready"),
    every(
        2,
        [
            (("engine-core", "null", *NULL), r"ready at (\S+)"),
            (("headrace", "serve", "null", *NULL, "--port", "0", "--api-server-count", "2"), r"ready: (\S+)/v1"),
            (("headrace", "serve", "null", *NULL, "--port", "0"), r"ready: (\S+)/v1"),
            (("headrace", "coordinator"), r"ready at (\S+)"),
        ],
    ),
    ids=["engine-core", "two processes", "serve", "coordinator"],
)
def test_a_signal_that_is_ignored_at_the_start_stays_so(command: tuple[str, ...], ready: str) -> None:
    program = str(Path(sys.executable).with_name(command[0]))
    with subprocess.Popen(
        [*IGNORING, program, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = next(found.group(1) for line in process.stdout if (found := re.search(ready, line)))
            assert {signal.SIGHUP, signal.SIGINT} <= ignored_by(process.pid)
            for number in (signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
            if command[0] == "engine-core":
                with connect(address) as llm:
                    assert llm.engine.model == "null"
            process.send_signal(signal.SIGTERM)
            told, _ = process.communicate(timeout=60)
            assert process.returncode == 0, told
        finally:
            process.kill()
