"""A server that drains says so on every connection, and leaves its address to a successor."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_server import Server, connection, read_all, refuses, serving
from patience import wait_until

COMPLETIONS = "/v1/completions"
SLOW = {"step_delay_s": 0.01}
ENDLESS = {"prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
SHORT = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@contextlib.contextmanager
def drained(*arguments: str, kept: int = 0) -> Iterator[tuple[Server, list[socket.socket]]]:
    """A server that drains: a stream holds it. With this many connections that it has answered on before."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving("--allowed-origins", '["*"]', "--shutdown-timeout", "120", *arguments, null_model=SLOW)
        )
        client = stack.enter_context(server.client())
        socks = [stack.enter_context(connection(server)) for _ in range(kept)]
        for sock in socks:
            is_alive(sock)
        with client.stream("POST", COMPLETIONS, json=ENDLESS) as response:
            assert next(response.iter_lines()).startswith("data: ")
            server.signal()
            # Connections are kept for half a second from now on.
            wait_until(lambda: refuses(server), 20, "the end of listening", most_pause_s=0.01)
            yield server, socks
        server.signal()


def is_alive(sock: socket.socket) -> None:
    sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        part = sock.recv(65536)
        assert part, answer
        answer += part


PREFLIGHT = (
    b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"origin: http://a\r\naccess-control-request-method: POST\r\n\r\n"
)
ROUTES: dict[str, tuple[int, bytes]] = {
    "a generation": (200, POST % len(SHORT) + SHORT),
    "not ready": (503, b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "alive": (200, b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "metrics": (200, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "models": (200, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "no route": (404, b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "a wrong method": (405, b"DELETE /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "a wrong body": (400, POST % 1 + b"{"),
    "a preflight": (200, PREFLIGHT),
}


def test_a_server_that_drains_answers_on_kept_connections_and_closes_them():
    with drained(kept=len(ROUTES)) as (_, socks):
        for (_, request), sock in zip(ROUTES.values(), socks, strict=True):
            sock.sendall(request)
        for (name, (status, _)), sock in zip(ROUTES.items(), socks, strict=True):
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (name, answer)
            assert b"\r\nconnection: close\r\n" in answer.lower(), (name, answer)


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.system), "2"])
def test_a_server_that_drains_refuses_connections(processes):
    with (
        drained("--api-server-count", processes) as (server, _),
        pytest.raises(httpx.ConnectError),
        server.client() as client,
    ):
        client.get("/health/live")


def test_what_came_before_the_drain_is_answered_in_full():
    """Requests behind one another, one whose body is on its way, and one that is half a line of headers."""
    rest: dict[socket.socket, tuple[bytes, int]] = {}
    one = POST % len(SHORT) + SHORT
    slow_body = json.dumps({"prompt": [5], "max_tokens": 30, "ignore_eos": True}).encode()
    slow = POST % len(slow_body) + slow_body
    with contextlib.ExitStack() as stack, serving(null_model=SLOW) as server:
        for before, after, count in (
            (slow + one + one, b"", 3),
            (one[:-5], one[-5:], 1),
            (one[:10], one[10:], 1),
            (slow[:-5], slow[-5:] + one, 2),
        ):
            sock = stack.enter_context(connection(server))
            sock.sendall(before)
            rest[sock] = (after, count)
        probe = stack.enter_context(connection(server))  # what was sent before this was read before its answer is
        is_alive(probe)
        server.signal()
        wait_until(lambda: refuses(server), 20, "the end of listening")
        for sock, (after, count) in rest.items():
            sock.sendall(after)
            answer = read_all(sock)
            assert answer.count(b"HTTP/1.1 200 OK") == count, answer
            assert answer.lower().count(b"\r\nconnection: close\r\n") == 1, answer
        assert server.wait_exit() == 0


def test_a_socket_file_is_free_for_a_successor_while_a_server_drains(tmp_path):
    path = str(tmp_path / "server.sock")
    with serving("--uds", path, null_model=SLOW) as old:
        old.url = "http://x"
        with (
            old.client(transport=httpx.HTTPTransport(uds=path)) as client,
            client.stream("POST", COMPLETIONS, json=ENDLESS) as response,
        ):
            assert next(response.iter_lines()).startswith("data: ")
            old.signal()
            old.wait_log("stopping; ")
            wait_until(lambda: not Path(path).exists(), 20, "the end of listening")
            with serving("--uds", path) as new:
                old.signal(signal.SIGTERM)
                assert old.wait_exit() == 0
                new.url = "http://x"
                with new.client(transport=httpx.HTTPTransport(uds=path)) as other:
                    assert other.get("/health/ready").status_code == 200
