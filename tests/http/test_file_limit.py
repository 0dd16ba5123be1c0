"""A server that may open no more files refuses connections in words, logs it, and goes on."""

from __future__ import annotations

import contextlib
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import Server, connection, processor_share, serving
from http_server import stream as stream_of
from patience import wait_until

LIMIT = 160


def stream(server: Server) -> str:
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "seed": 1}
    with server.client() as client:
        return "".join(event["choices"][0]["text"] for event in stream_of(client, "/v1/completions", body))


def is_open(server: Server) -> bool:
    """Whether it takes a connection, as soon as it has seen that others were closed."""
    with server.client() as client:
        return client.get("/health/live").status_code == 200


@pytest.mark.system
def test_connections_beyond_the_limit_of_files_are_refused_in_words_and_all_else_goes_on() -> None:
    with serving(null_model={"step_delay_s": 0.02}) as server, ThreadPoolExecutor(2) as pool:
        expected = stream(server)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        running = pool.submit(stream, server)
        refused = 0
        with contextlib.ExitStack() as stack:
            for _ in range(LIMIT):
                each = stack.enter_context(connection(server))
                each.sendall(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                answer = each.recv(65536)
                assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), answer
                if answer.startswith(b"HTTP/1.1 503"):
                    refused += 1
                    assert b"too_many_connections" in answer
            assert 0 < refused < LIMIT
            assert running.result(60) == expected
            server.wait_log(rf"\d+ connections are open, and this process may have {LIMIT} files")
            assert processor_share([server.process.pid], 0.5) < 0.5
        assert server.log.count("connections are open") == 1
        wait_until(lambda: is_open(server), 60, "new connections to be taken again")
        assert stream(server) == expected


def test_a_burst_of_connections_at_the_limit_is_logged_and_ends_nothing() -> None:
    with serving(null_model={}) as server:
        expected = stream(server)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with contextlib.ExitStack() as stack:
            for _ in range(2 * LIMIT):
                stack.enter_context(connection(server))
            server.wait_log(r"\d+ connections are open")
        wait_until(lambda: is_open(server), 60, "new connections to be taken again")
        assert stream(server) == expected
