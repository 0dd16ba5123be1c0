"""A server whose system gives it little, or another time: streams go on unchanged, and it serves when that is over."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from http_server import HERE, Server, ask, connection, serving, stream
from patience import wait_until

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
KEY = "a-key-of-22-characters"
DAY_S = 86_400
ROOM_BYTES = 1 << 30
MOST_BODY_BYTES = 8 << 20
LONG = {"prompt": [5, 6, 7], "max_tokens": 600, "ignore_eos": True, "seed": 1, "temperature": 1.0}
NULL = {"step_delay_s": 0.005}


def tokens(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@contextlib.contextmanager
def streaming(client: httpx.Client) -> Iterator[Future[str]]:
    """A stream that runs all the while; its text when it has ended."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(lambda: tokens(stream(client, COMPLETIONS, LONG)))


# --- descriptors and memory ------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_server_without_descriptors_keeps_its_streams_and_serves_when_there_are_some() -> None:
    with serving(null_model=NULL) as server, server.client() as client, contextlib.ExitStack() as held:
        alone = tokens(stream(client, COMPLETIONS, LONG))
        process = psutil.Process(server.process.pid)
        with streaming(client) as beside:
            wait_until(lambda: client.get("/load").json()["server_load"] == 1, 30, "its start")
            most = process.num_fds() + 8
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, before[1]))
            for _ in range(100):
                held.enter_context(connection(server))
            server.wait_log(rf"\d+ connections are open, and this process may have {most} files")
            assert beside.result() == alone
        used_s = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - used_s < 0.5, "it tries again and again to take connections"
        held.close()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        with server.client() as another:
            assert tokens(stream(another, COMPLETIONS, LONG)) == alone
        server.signal()
        assert server.wait_exit() == 0


def filled(head: str, piece: str, tail: str) -> str:
    return head + piece * ((MOST_BODY_BYTES - len(head) - len(tail)) // len(piece)) + tail


HUGE: dict[str, tuple[str, Callable[[], str]]] = {
    "a text": (COMPLETIONS, lambda: filled('{"prompt":"', "word ", '","max_tokens":1}')),
    "texts": (COMPLETIONS, lambda: json.dumps({"prompt": ["word " * 400] * 1000, "max_tokens": 1})),
    "tokens": (COMPLETIONS, lambda: json.dumps({"prompt": [5] * 1_000_000, "max_tokens": 1})),
    "lists": (COMPLETIONS, lambda: filled('{"prompt":[[5]', ",[5]", "]}")),
    "messages": (CHAT, lambda: filled('{"messages":[{}', ',{"role":"user","content":"x"}', "]}")),
    "depth": (CHAT, lambda: '{"messages":' + "[" * 4_000_000 + "]" * 4_000_000 + "}"),
    "answers": (COMPLETIONS, lambda: json.dumps({"prompt": [[5]] * 500, "logprobs": 20, "max_tokens": 8})),
    "a text to tokens": ("/tokenize", lambda: filled('{"prompt":"', "word ", '"}')),
}


@pytest.mark.system
def test_a_server_with_a_gigabyte_of_memory_answers_huge_bodies_without_failing_and_keeps_its_streams() -> None:
    with serving(null_model=NULL) as server, server.client() as client:
        process = psutil.Process(server.process.pid)
        alone = tokens(stream(client, COMPLETIONS, LONG))
        most = process.memory_info().vms + ROOM_BYTES
        resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
        with streaming(client) as beside:
            for name, (path, body) in HUGE.items():
                answer = client.post(path, content=body(), headers={"content-type": "application/json"})
                assert answer.status_code < 500, (name, answer.text[:300])
            assert beside.result() == alone
        server.signal()
        assert server.wait_exit() == 0


# --- the clock -------------------------------------------------------------------------------------------------------


class Clock:
    """The clock of the day of all processes that are started with it."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        self.move(0)
        library = folder / "set_clock.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", HERE / "set_clock.c", "-o", library, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def move(self, seconds: int) -> None:
        """Away from the true time."""
        with self._offset.open("r+b" if self._offset.exists() else "w+b") as file:
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


@pytest.mark.system
def test_a_clock_that_jumps_a_day_on_and_back_ends_and_changes_nothing(clock: Clock, tmp_path: Path) -> None:
    store = str(tmp_path / "responses.sqlite")
    with serving("--restart-engine", "2", "--response-store", store, null_model=NULL) as server:
        with server.client() as client:
            engine = psutil.Process(server.process.pid).children()
            alone = tokens(stream(client, COMPLETIONS, LONG))
            began = ask(client, RESPONSES, input="x", background=True, max_output_tokens=600)
            seen = []
            with streaming(client) as beside:
                for jump_s in (DAY_S, -DAY_S, 0):
                    wait_until(lambda: client.get("/load").json()["server_load"] > 0, 30, "its start")
                    clock.move(jump_s)
                    created = ask(client, COMPLETIONS, prompt=[5], max_tokens=2)["created"]
                    assert abs(created - time.time() - jump_s) < 60, "the clock was not moved"
                    assert client.get("/health").status_code == 200
                    found = client.get(f"{RESPONSES}/{began['id']}").json()
                    seen.append((found["status"], found["error"]))
                assert beside.result() == alone
            assert [error for _, error in seen] == [None] * 3
            assert seen[0][0] == "in_progress"
            wait_until(
                lambda: client.get(f"{RESPONSES}/{began['id']}").json()["status"] in ("completed", "incomplete"),
                20,
                "the response's end",
            )
            assert psutil.Process(server.process.pid).children() == engine
        server.signal()
        assert server.wait_exit() == 0


# --- keys ------------------------------------------------------------------------------------------------------------


GUESSES = (
    *("", " ", KEY[:-1], KEY + "x", KEY + "\t.", KEY.upper(), KEY[::-1], KEY[1:], f"{KEY} {KEY}", f"{KEY},{KEY}"),
    *("null", "None", "undefined", "true", "0", "*", "%", "..", "' or '1'='1", "${KEY}", "EMPTY", "sk-", "Bearer"),
    *(f'"{KEY}"', f"Bearer {KEY}", f"key={KEY}", f"{KEY}\u00e9", "a" * 20_000, "[]", "{}", "\u0661"),
)
HEADERS: tuple[tuple[str, str], ...] = (
    ("authorization", KEY), ("authorization", f"Basic {KEY}"), ("authorization", f"Bearer:{KEY}"),
    ("authorization", f"Bearer{KEY}"), ("authorization", f"Token {KEY}"), ("api-key", KEY), ("x-api-keys", KEY),
    ("cookie", f"authorization=Bearer {KEY}"), ("proxy-authorization", f"Bearer {KEY}"),
    ("x-forwarded-for", "127.0.0.1"), ("x-original-url", "/health"), ("x-rewrite-url", "/health"),
    ("x-http-method-override", "OPTIONS"), ("x-forwarded-host", "localhost"),
)  # fmt: skip
PATHS = (
    "//v1/models",
    "/health/../v1/models",
    "/v1/models/",
    "/health/%2e%2e/v1/models",
    "/V1/MODELS",
    "/v1/models;/health",
)


def test_no_guess_of_a_key_no_other_header_and_no_spelling_of_a_path_opens_any_route() -> None:
    with serving("--api-key", KEY) as server, server.client() as client:
        document = client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
        routes = [
            (method, path)
            for path, methods in document["paths"].items()
            for method in methods
            if path != "/" and not path.startswith(("/health", "/ping", "/metrics", "/version"))
        ]
        assert len(routes) >= 19
        for method, path in routes:
            assert client.request(method, path).status_code == 401, (method, path)
        bearers = [("authorization", f"Bearer {guess}") for guess in GUESSES]
        for header in (*bearers, *(("x-api-key", guess) for guess in GUESSES), *HEADERS):
            line = ": ".join(header).encode()
            answer = raw(
                server, b"GET /v1/models HTTP/1.1\r\nconnection: close\r\nhost: localhost\r\n%b\r\n\r\n" % line
            )
            assert answer.split(b" ")[1] == b"401", (header, answer[:200])
        for path in PATHS:
            answer = raw(server, b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path.encode())
            assert answer.split(b" ")[1] in (b"401", b"404"), (path, answer[:200])


def raw(server: Server, sent: bytes) -> bytes:
    with connection(server) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(65536):
            answer += data
        return answer
