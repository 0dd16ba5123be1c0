"""Servers restarted in turn behind a proxy lose no request; a server that drains says so on every connection."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from debian_programs import program
from http_server import Server, connection, read_all, refuses, serving, wait_until

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
COMPLETIONS = "/v1/completions"
SLOW = {"step_delay_s": 0.01}
ENDLESS = {"prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
SHORT = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
MOST_REQUESTS = 20_000
NUM_REQUESTS = 1_000


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def nginx(folder: Path, text: str) -> Iterator[None]:
    """Runs it with this configuration."""
    (folder / "nginx.conf").write_text(text)
    command = [program("nginx", "usr/sbin/nginx"), "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    process = subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.PIPE)
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=20)


def nginx_conf(ports: tuple[int, int], port: int) -> str:
    """The configuration of docs/deploy for these servers."""
    text = (DEPLOY / "nginx.conf").read_text()
    for number, each in enumerate(ports, 1):
        assert f"10.0.0.{number}:8000" in text
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{each}")
    assert "listen 8080;" in text
    return in_folder(text.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace("auto;", "1;"))


def plain_conf(ports: tuple[int, int], port: int) -> str:
    """nginx's own defaults."""
    servers = "".join(f"server 127.0.0.1:{each};" for each in ports)
    server = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://headrace; }} }}"
    return in_folder(f"pid nginx.pid; events {{}} http {{ upstream headrace {{ {servers} }} {server} }}")


def in_folder(text: str) -> str:
    """With bodies and logs in the test's folder."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {kind};" for kind in kinds)
    return text.replace("http {", f"http {{ access_log off; {paths}", 1)


class Load:
    """Clients that ask one request after the other, streaming and not, over connections that they keep."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.url = url
        self.num_right, self.wrong = 0, list[str]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join(60)

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60, verify=False) as client:
            while not self._over.is_set():
                number += 1
                try:
                    what = self._one(client, streams=number % 2 == 0)
                except httpx.HTTPError as error:
                    what = repr(error)
                with self._lock:
                    self.num_right += not what
                    if what:
                        self.wrong.append(what)
                if self.num_right + len(self.wrong) > MOST_REQUESTS:
                    return

    @staticmethod
    def _one(client: httpx.Client, *, streams: bool) -> str:
        """What was wrong with the answer; empty if nothing was."""
        body = {"prompt": [5, 6], "max_tokens": 8, "ignore_eos": True, "stream": streams}
        answer = client.post(COMPLETIONS, json=body)
        is_whole = '"finish_reason":"length"' in answer.text and (not streams or answer.text.endswith("[DONE]\n\n"))
        return "" if answer.status_code == 200 and is_whole else f"{answer.status_code} {answer.text[-200:]}"


def test_two_servers_behind_nginx_are_restarted_in_turn_and_no_request_is_lost(tmp_path):
    ports, port = (free_port(), free_port()), free_port()
    model = {"step_delay_s": 0.002, "load_delay_s": 1.0}  # so long it answers 503

    def start(at: int) -> Server:
        return Server("--port", str(at), null_model=model)

    servers = [start(each) for each in ports]
    try:
        for each in servers:
            each.wait_ready()
        with nginx(tmp_path, nginx_conf(ports, port)), httpx.Client(base_url=f"http://127.0.0.1:{port}") as probe:
            wait_until(lambda: answers(probe), 20, "nginx to answer")
            with Load(f"http://127.0.0.1:{port}", 6) as load:
                restarts = 0
                while restarts < 2 or load.num_right < NUM_REQUESTS:
                    which = restarts % 2
                    before = load.num_right
                    wait_until(lambda at=before: load.num_right > at + 50 or bool(load.wrong), 60, "requests")
                    servers[which].signal()
                    assert servers[which].wait_exit(40) == 0
                    servers[which] = start(ports[which]).wait_ready()
                    restarts += 1
                    assert not load.wrong, load.wrong[:5]
        assert load.wrong == []
        assert load.num_right >= NUM_REQUESTS
    finally:
        for each in servers:
            each.close()


def test_a_server_that_stops_behind_nginx_as_it_comes_loses_no_request(tmp_path):
    """Its connections are refused from the first signal on, so nginx takes the other server, also for a POST."""
    ports, port = (free_port(), free_port()), free_port()
    with contextlib.ExitStack() as stack:
        first, _ = (
            stack.enter_context(
                serving("--port", str(each), "--allowed-hosts", "headrace", null_model={"step_delay_s": 0.002})
            )
            for each in ports
        )
        stack.enter_context(nginx(tmp_path, plain_conf(ports, port)))
        probe = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        wait_until(lambda: answers(probe), 20, "nginx to answer")
        held = stack.enter_context(first.client())
        with Load(f"http://127.0.0.1:{port}", 6) as load:
            wait_until(lambda: load.num_right > 100, 60, "requests")
            with held.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 500}) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                first.signal()
                assert [line for line in lines if line][-1] == "data: [DONE]"  # it drains for a second
            assert first.wait_exit(40) == 0
            before = load.num_right
            wait_until(lambda: load.num_right > before + 100 or bool(load.wrong), 60, "requests")
        assert load.wrong == []


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/health/ready").status_code == 200
    return False


# --- a drain, connection by connection -----------------------------------------------------------------------------


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
            wait_until(lambda: refuses(server), 20, "the end of listening")
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
        for (name, (status, request)), sock in zip(ROUTES.items(), socks, strict=True):
            sock.sendall(request)
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (name, answer)
            assert b"\r\nconnection: close\r\n" in answer.lower(), (name, answer)


@pytest.mark.parametrize("processes", ["1", "2"])
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
