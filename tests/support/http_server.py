"""A real server process on a loopback port, for tests; by default with a null engine, which computes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from patience import within

START_TIMEOUT_S = 60.0
HERE = Path(__file__).parent


class Server:
    """`headrace serve` as a program. Its log is kept in `log`."""

    program: Sequence[str] = (sys.executable, "-m", "headrace")

    def __init__(self, *arguments: str, null_model: dict[str, Any] | None = None, attached: bool = False) -> None:
        """null_model: fields of NullModel. attached: starts no engine; the arguments must include --engine."""
        engine = [] if attached else null_engine_arguments(**(null_model or {}))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }
        for name in ("HEADRACE_API_KEY", "VLLM_API_KEY"):
            environment.pop(name, None)
        # The parent binds the port for its HTTP children, so port 0 works with any number of processes.
        where = [] if "--uds" in arguments or "--port" in arguments else ["--port", "0"]
        self.process = subprocess.Popen(
            [*self.program, "serve", *engine, *where, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.log = ""
        self.url = ""

    def wait_ready(self) -> Server:
        self.wait_log(r"ready: \S+")
        found = re.search(r"ready: (\S+)/v1 for clients", self.log)
        assert found is not None, self.log
        self.url = found.group(1)
        return self

    def wait_log(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until the log matches the pattern."""
        assert self.process.stderr is not None
        fd, end_s = self.process.stderr.fileno(), time.monotonic() + within(timeout_s)
        while not re.search(pattern, self.log):
            assert select.select([fd], [], [], max(0.0, end_s - time.monotonic()))[0], f"no {pattern!r}: {self.log}"
            data = os.read(fd, 65536)
            assert data, f"it ended with {self.process.wait()}: {self.log}"
            self.log += data.decode()

    def client(self, **more: Any) -> httpx.Client:
        # Reading the system's certificates takes 30 ms, and only the test of TLS needs them.
        return httpx.Client(base_url=self.url, timeout=within(30), **{"verify": False, **more})

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 15.0) -> int:
        """Waits for the end of the process, reads the rest of the log, and returns the exit status."""
        _, rest = self.process.communicate(timeout=within(timeout_s))
        self.log += rest.decode()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.wait_exit(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def serving(*arguments: str, null_model: dict[str, Any] | None = None, attached: bool = False) -> Iterator[Server]:
    server = Server(*arguments, null_model=null_model, attached=attached)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def null_engine_arguments(**model: Any) -> list[str]:
    overrides = json.dumps({"vocab_size": VOCAB_SIZE, **model})
    return ["null", "--distributed-executor-backend", BACKEND, "--hf-overrides", overrides]


def events_of(response: httpx.Response) -> list[Any]:
    """The decoded JSON of a stream's events, without the last, which is checked to be [DONE]."""
    # Not by iter_lines, which treats some characters within an event as line ends.
    lines = [line for line in response.read().decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ask(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return events_of(response)


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels. Fails if there are none."""
    total, found = 0.0, False
    for line in client.get("/metrics").text.splitlines():
        match = re.match(r"([\w:]+)(\{.*\})? (\S+)$", line)
        if match is not None and match.group(1) == name:
            given = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
            if labels.items() <= given.items():
                total, found = total + float(match.group(3)), True
    assert found, name
    return total


def processor_share(pids: Sequence[int], window_s: float) -> float:
    """The processes' share of one core while this process sleeps. Precise to nanoseconds, unlike the system's ticks of
    10 ms."""
    before_s = sum(_processor_s(pid) for pid in pids)
    time.sleep(window_s)
    return (sum(_processor_s(pid) for pid in pids) - before_s) / window_s


def _processor_s(pid: int) -> float:
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")  # see proc(5): the first number is nanoseconds of CPU time
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@contextmanager
def connection(server: Server) -> Iterator[socket.socket]:
    """A plain TCP connection, to send what no HTTP client would."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        yield sock


def refuses(server: Server) -> bool:
    """Whether it has stopped listening."""
    try:
        with connection(server):
            return False
    except ConnectionRefusedError:
        return True


def read_all(sock: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def engines_of(server: Server) -> list[psutil.Process]:
    """Those that live: one that has just ended is a zombie until its parent waits for it."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "headrace.core.process.daemon" in child.cmdline():
                found.append(child)
    return found


def engine_of(server: Server) -> psutil.Process:
    (engine,) = [
        each
        for each in psutil.Process(server.process.pid).children()
        if "headrace.core.process.daemon" in str(each.cmdline())
    ]
    return engine


def address_of_engine(server: Server) -> str:
    paths = [each.laddr for each in engine_of(server).net_connections("unix") if str(each.laddr).endswith(".sock")]
    return f"ipc://{paths[0]}"
