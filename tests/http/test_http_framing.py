"""Requests that break off or whose end cannot be told: the client reads why, what came before is answered, and what
nobody waits for is ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from http_server import Server, connection, metric, read_all, serving
from patience import wait_until
from thinned import every

from headrace.frontend.http.server.connection import MOST_JOINED_BYTES, HeldHead
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.generation import first_of

BODY = json.dumps({"prompt": [5], "max_tokens": 2, "ignore_eos": True}).encode()
LONG = json.dumps({"prompt": [5], "max_tokens": 20_000, "ignore_eos": True}).encode()
CHUNKED = b"transfer-encoding: chunked"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
HALF = b'8\r\n{"prompt\r\n'
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
IN_BODY = "the end of the request's body cannot be told: "
BROKEN = {
    "a size that is no number": (HALF + b"xyz\r\n", 400, IN_BODY),
    "a size of too many digits": (HALF + b"f" * 17 + b"\r\n", 400, IN_BODY),
    "a size without its CRLF": (HALF + b"5\n", 400, IN_BODY),
    "a chunk without its CRLF": (b'8\r\n{"prompt5\r\n', 400, IN_BODY),
    "a chunk longer than it says": (b"3\r\n%b\r\n0\r\n\r\n" % BODY, 400, IN_BODY),
    "an extension with a line's end": (HALF + b"5;a\nb\r\n", 400, IN_BODY),
    "a very long extension": (HALF + b"5;" + b"a" * 800_000, 431, "the trailers or chunk extensions are larger"),
    "a trailer without a name": (CHUNK + b"0\r\n: y\r\n\r\n", 400, IN_BODY),
    "a trailer without a colon": (CHUNK + b"0\r\nx y\r\n\r\n", 400, IN_BODY),
    "a trailer with a zero": (CHUNK + b"0\r\nx: a\x00b\r\n\r\n", 400, IN_BODY),
    "a length among the trailers": (CHUNK + b"0\r\ncontent-length: 5\r\n\r\n", 400, IN_BODY),
    "very many trailers": (CHUNK + b"0\r\n" + b"x: y\r\n" * 100_000, 431, "the trailers or chunk extensions are"),
}
CUT_SHORT = {
    "headers": HEALTH[:-4],
    "the first line": HEALTH[:5],
    "a body of a length": b"content-length: 100\r\n\r\n" + BODY,
    "a body of a length, all of it": b"content-length: 100\r\n\r\n",
    "a chunk": CHUNKED + b"\r\n\r\n40\r\n{",
    "the last chunk": CHUNKED + b"\r\n\r\n" + CHUNK,
    "trailers": CHUNKED + b"\r\n\r\n" + CHUNK + b"0\r\nx: y\r\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--read-timeout", "5", "--enable-log-requests", null_model={"step_delay_s": 0.002}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(*headers: bytes, body: bytes = b"", content_type: bytes = b"application/json") -> bytes:
    lines = (b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: " + content_type, *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def whole(body: bytes) -> bytes:
    return post(b"content-length: %d" % len(body), body=body)


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)]


def message_of(answers: bytes) -> str:
    """What the last of the answers says, which has to be JSON of its length."""
    head, _, body = answers.rpartition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    assert head.endswith(b"connection: close")
    message: str = json.loads(body)["error"]["message"]
    return message


def in_flight(client: httpx.Client) -> float:
    return metric(client, "headrace:requests_in_flight")


@pytest.mark.parametrize("name", every(2, BROKEN))
@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "while its handler waits"])
def test_a_body_whose_end_cannot_be_told_is_refused_with_a_reason(
    server: Server, client: httpx.Client, name: str, is_split: bool
) -> None:
    body, status, reason = BROKEN[name]
    with connection(server) as sock:
        sock.sendall(post(CHUNKED))
        if is_split:
            wait_until(lambda: in_flight(client) == 2, 30, "its start")  # the other asks
        with contextlib.suppress(OSError):  # of the large ones no more is read
            sock.sendall(body if status == 431 else body + HEALTH)
        answers = read_all(sock)
    assert statuses(answers) == [status], answers
    assert message_of(answers).startswith(reason)
    assert len(message_of(answers)) > len(reason)
    wait_until(lambda: in_flight(client) == 1, 30, "its handler's end")


def test_the_log_says_what_was_wrong_with_a_request(server: Server) -> None:
    with connection(server) as sock:
        sock.sendall(post(CHUNKED, body=HALF + b"xyz\r\n"))
        read_all(sock)
    server.wait_log(r"POST /v1/completions: 400 the end of the request's body cannot be told", 10)


@pytest.mark.parametrize("name", CUT_SHORT)
def test_a_request_that_breaks_off_is_refused_with_a_reason(server: Server, client: httpx.Client, name: str) -> None:
    """Its client has closed its own side, and still reads."""
    sent = CUT_SHORT[name]
    with connection(server) as sock:
        sock.sendall(sent if sent[:3] == b"GET" else post(sent)[:-4])
        sock.shutdown(socket.SHUT_WR)
        answers = read_all(sock)
    assert statuses(answers) == [400], answers
    assert message_of(answers) == "the connection was closed before the request was complete"
    wait_until(lambda: in_flight(client) == 1, 30, "its handler's end")


@pytest.mark.parametrize("size", [70_000, 300_000, 3_000_000])
@pytest.mark.parametrize("where", ["address", "header", "many headers", "nonsense"])
def test_an_answer_reaches_a_client_that_sends_more_than_is_read(server: Server, size: int, where: str) -> None:
    """A connection that is closed with unread data is reset, and the answer lost."""
    head, status = {
        "address": (b"GET /health?%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"a" * size), 431),
        "header": (HEALTH[:-2] + b"x: %b\r\n\r\n" % (b"a" * size), 431),
        "many headers": (HEALTH[:-2] + b"x: y\r\n" * (size // 6) + b"\r\n", 431),
        "nonsense": (b"\x16\x03\x01" + b"\0" * size, 400),
    }[where]
    with connection(server) as sock:
        sock.sendall(head)
        answers = b""
        while part := sock.recv(65536):
            answers += part
    assert statuses(answers) == [status], answers


def test_a_client_that_leaves_between_requests_or_before_one_is_told_nothing(server: Server) -> None:
    for before, expected in ((b"", []), (HEALTH, [200]), (whole(BODY), [200])):
        with connection(server) as sock:
            answers = b""
            sock.sendall(before)
            while statuses(answers) != expected:
                answers += sock.recv(65536)
            sock.shutdown(socket.SHUT_WR)
            assert statuses(answers + read_all(sock)) == expected


@pytest.mark.parametrize(
    "broken",
    [post(CHUNKED, body=HALF + b"xyz\r\n"), b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["a broken body", "nonsense", "headers that are refused"],
)
def test_requests_before_a_broken_one_are_answered_first(server: Server, broken: bytes) -> None:
    with connection(server) as sock:
        sock.sendall(whole(BODY) + HEALTH + broken + HEALTH)
        answers = read_all(sock)
    assert statuses(answers) == [200, 200, 400]
    assert b'"completion_tokens":2' in answers


def test_a_request_that_was_refused_before_its_body_broke_is_answered_once(server: Server) -> None:
    with connection(server) as sock:
        sock.sendall(post(CHUNKED, body=HALF, content_type=b"text/plain"))
        answers = sock.recv(65536)
        sock.sendall(b"xyz\r\n")
        answers += read_all(sock)
    assert statuses(answers) == [400]
    assert b"Content-Type: application/json" in answers


@pytest.mark.parametrize("behind", [b"", HEALTH, HEALTH[:-2], post(CHUNKED, body=HALF)])
def test_a_request_ends_with_its_connection_whatever_was_sent_behind_it(
    server: Server, client: httpx.Client, behind: bytes
) -> None:
    with connection(server) as sock:
        sock.sendall(whole(LONG) + behind)
        wait_until(lambda: metric(client, "headrace:num_requests_running") == 1, 30, "its start")
    wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "its end")
    wait_until(lambda: in_flight(client) == 1, 30, "its handler's end")


class Written(asyncio.Transport):
    """What was written to it, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append(b"closed")

    def is_closing(self) -> bool:
        return False


def test_the_head_of_an_answer_leaves_with_what_follows_it() -> None:
    joined, large, empty = Written(), Written(), Written()
    held = HeldHead(joined)
    held.write(b"head ")
    assert joined.calls == []
    for part in (b"first", b"second"):
        held.write(part)
    held.close()
    assert joined.calls == [b"head first", b"second", b"closed"]
    held, part = HeldHead(large), bytes(MOST_JOINED_BYTES + 1)
    held.write(b"head")
    held.write(part)
    assert large.calls == [b"head", part]
    held = HeldHead(empty)
    held.write(b"head")
    held.close()
    assert empty.calls == [b"head", b"closed"]


def test_an_answer_without_a_body_holds_nothing_back(server: Server) -> None:
    with connection(server) as sock:
        sock.sendall(HEALTH.replace(b"GET", b"HEAD") + HEALTH + b"nonsense\r\n\r\n")
        assert statuses(read_all(sock)) == [200, 200, 400]


def test_a_wait_ends_with_the_request_or_its_client_or_at_its_deadline() -> None:
    async def waited(done_s: float | None, gone_s: float | None, deadline_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        done, gone = loop.create_future(), loop.create_future()
        for each, after_s in ((done, done_s), (gone, gone_s)):
            if after_s is not None:
                loop.call_later(after_s, each.set_result, None) if after_s else each.set_result(None)
        return await first_of(done, gone, None if deadline_s is None else loop.time() + deadline_s)

    def wait(*after_s: float | None) -> bool:
        return asyncio.run(waited(*after_s))

    assert wait(0.01, None, None)
    assert wait(0.01, None, 30.0)
    assert wait(0.0, 0.0, None)  # both, and the answer is there
    assert not wait(None, 0.01, None)
    assert not wait(None, 0.0, 30.0)
    with pytest.raises(ApiError, match="took longer"):
        wait(None, None, 0.01)
