"""Ctrl-C at any instant of any command's start ends it quietly with status 130.

From the first line of ours on: what the interpreter does before that is not in our hands. The instants of a normal run
are few; HEADRACE_INTERRUPTS=200 tries so many of each command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from thinned import every

NULL = [
    "null",
    "--distributed-executor-backend",
    "headrace.executor.testing.null:NullExecutor",
    "--skip-tokenizer-init",
]
MODEL = ["--model", *NULL]
NUM_INSTANTS = int(os.environ.get("HEADRACE_INTERRUPTS", "3"))
LATEST_S = 1.2
AT_ONCE = 3
COMMANDS = {
    "version": ["version"],
    "options": ["options"],
    "collect-env": ["collect-env"],
    "doctor": ["doctor"],
    "models": ["models"],
    "completion": ["completion", "bash"],
    "ps": ["ps"],
    "top": ["top"],
    "complete": ["complete", "x", *MODEL],
    "chat": ["chat", *MODEL],
    "demo": ["demo", *MODEL],
    "run-batch": ["run-batch", "-i", "requests.jsonl", "-o", "results.jsonl", *MODEL],
    "serve": ["serve", *NULL, "--port", "0"],
    "serve with processes": ["serve", *NULL, "--port", "0", "--api-server-count", "2"],
    "save-sharded-state": ["save-sharded-state", "no-such-folder", "-o", "weights"],
    "bench latency": ["bench", "latency", *MODEL],
    "bench throughput": ["bench", "throughput", *MODEL, "--num-prompts", "9"],
    "bench serve": ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "60"],
    "bench startup": ["bench", "startup", *MODEL],
    "bench overhead": ["bench", "overhead"],
    "bench sweep": ["bench", "sweep", "--num-runs", "1", "--bench-cmd", "sleep 60"],
    "keys": ["keys", "new.keys"],
    "drain": ["drain", "ipc://nobody.sock"],
    "scale": ["scale", "2", "--url", "http://127.0.0.1:9"],
    "coordinator": ["coordinator"],
    "engine-core": NULL,
}
DAEMONS = ("serve", "serve with processes", "coordinator", "engine-core")
"""Once they serve, an interrupt is the way to stop them in order, with status 0."""
NOISE = ("Traceback", "KeyboardInterrupt", "never awaited", "Exception ignored", "Error")
PROGRAM = "import os, sys, headrace.programs as p; os.write(1, b'!'); sys.exit(getattr(p, sys.argv.pop(1))())"


def interrupted(command: str, after_s: float, folder: Path) -> tuple[int, str]:
    """The exit status and stderr of the command, sent SIGINT so long after our first line."""
    name = "engine_core" if command == "engine-core" else "headrace"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, *COMMANDS[command]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.read(1) == b"!"
        time.sleep(after_s)  # the instant that is tried
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    return program.returncode, errors.decode(errors="replace")


@pytest.mark.parametrize("command", every(4, COMMANDS))
def test_an_interrupt_at_any_instant_ends_a_command_quietly(command: str, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("{}\n" * 3)
    instants = [LATEST_S * (index / NUM_INSTANTS) ** 2 for index in range(NUM_INSTANTS)]
    found: dict[float, tuple[int, str]] = {}

    def try_instants(first: int) -> None:
        for after_s in instants[first::AT_ONCE]:
            folder = tmp_path / f"{after_s:.6f}"
            folder.mkdir()
            (folder / "requests.jsonl").write_text("{}\n" * 3)
            found[after_s] = interrupted(command, after_s, folder)

    threads = [threading.Thread(target=try_instants, args=(first,)) for first in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(instants)
    assert any(status == 130 for status, _ in found.values()), f"{command} was interrupted at no instant"
    for after_s, (status, errors) in sorted(found.items()):
        told = f"{command} interrupted after {after_s:.4f} s ended with {status}: {errors}"
        assert status >= 0, told  # by a signal: no handler stood
        if status == 130 or command in DAEMONS:
            assert not any(word in errors for word in NOISE), told
            assert status in (0, 130), told
