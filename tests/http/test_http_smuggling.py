"""Requests whose end two programs could see in different places: none of them brings a second request with it.

A proxy that reads such a request in another way than the server does would let through what it never saw (request
smuggling). So each is refused and its connection closed, and what follows it on the connection is never answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from http_server import Server, connection, serving

JSON = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
LENGTH = b"content-length: %d" % len(JSON)
CHUNKED = b"transfer-encoding: chunked"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"


def post(*headers: bytes, body: bytes = IN_CHUNKS, version: bytes = b"HTTP/1.1") -> bytes:
    lines = (b"POST /v1/completions " + version, b"host: localhost", b"content-type: application/json", *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def in_chunks(body: bytes) -> bytes:
    return post(CHUNKED, body=body)


LENGTHS = (
    b"+29",
    b"-1",
    b"0x1d",
    b"2 9",
    b"",
    b"1e1",
    b"18446744073709551645",
    b"29\x0b",
    b"\xb2\xb9",
    b"29, 29",
    b"0, 29",
)
CODINGS = (b"xchunked", b"identity", b"identity, chunked", b"gzip, chunked", b'"chunked"', b"chunked;a", b"chunked,")
SIZE, END = b"%x" % len(JSON), b"\r\n%b\r\n0\r\n\r\n" % JSON
REFUSED = {
    "length before chunks": post(b"content-length: %d" % len(IN_CHUNKS), CHUNKED),
    "length after chunks": post(CHUNKED, b"content-length: 4"),
    "length of nothing and chunks": post(b"content-length: 0", CHUNKED),
    "two lengths": post(LENGTH, b"content-length: 0", body=JSON),
    "one length twice": post(LENGTH, LENGTH, body=JSON),
    "a space after a length's name": post(b"content-length : %d" % len(JSON), body=JSON),
    **{f"a length of {value!r}": post(b"content-length: " + value, body=JSON) for value in LENGTHS},
    **{f"a coding of {value!r}": post(b"transfer-encoding: " + value) for value in CODINGS},
    "chunks after they are chunks": post(b"transfer-encoding: chunked, identity"),
    "a coding beside a length": post(b"transfer-encoding: identity", LENGTH, body=JSON),
    "chunks twice": post(CHUNKED, CHUNKED),
    "chunks and more": post(CHUNKED, b"transfer-encoding: x"),
    "a space after a coding's name": post(b"transfer-encoding : chunked"),
    "a space before a coding": post(b" transfer-encoding: chunked"),
    "a coding on the next line": post(b"transfer-encoding:\r\n chunked"),
    "a coding with a tab of its own": post(b"transfer-encoding: \x0bchunked"),
    "a coding with a zero": post(CHUNKED + b"\x00"),
    "a line that ends with LF alone": post(b"x: y\ntransfer-encoding: chunked"),
    "a CR within a line": post(b"x: y\rtransfer-encoding: chunked"),
    "chunks of HTTP/1.0": post(CHUNKED, version=b"HTTP/1.0"),
    "a wish for HTTP/2 with both": post(b"connection: upgrade", b"upgrade: h2c", b"content-length: 0", CHUNKED),
    "a wish for HTTP/2 with a coding": post(b"connection: upgrade", b"upgrade: h2c", b"transfer-encoding: xchunked"),
    "lines that end with LF alone": b"GET /health HTTP/1.1\nhost: x\n\n",
    "a path of two words": b"GET /health /x HTTP/1.1\r\nhost: localhost\r\n\r\n",
    **{f"a chunk of {size!r}": in_chunks(size + END) for size in (b"0x1d", b"+1d", b"-1d", b" 1d", b"1d ", b"1" * 17)},
    "a chunk's size that ends with LF": in_chunks(SIZE + b"\n" + END[2:]),
    "a chunk that ends with LF": in_chunks(SIZE + b"\r\n%b\n0\r\n\r\n" % JSON),
    "a chunk's extension with an LF": in_chunks(SIZE + b";a\nb" + END),
    "a chunk longer than it says": in_chunks(b"%x" % (len(JSON) - 1) + END),
    "a length among the trailers": in_chunks(SIZE + END[:-2] + b"content-length: 5\r\n\r\n"),
}
TAKEN = {
    "chunks": in_chunks(SIZE + END),
    "chunks with an extension": in_chunks(SIZE + b";a=b" + END),
    "chunks by another case": post(b"Transfer-Encoding: Chunked"),
    "trailers": in_chunks(SIZE + END[:-2] + b"x-host: y\r\n\r\n"),
    "a body where none is needed": b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\n%b"
    % (b"content-length: %d" % len(HIDDEN), HIDDEN),
    "a length named as of the connection": post(b"connection: content-length", LENGTH, body=JSON),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--read-timeout", "2") as server:
        yield server


def statuses(server: Server, sent: bytes, *, until: int | None = None) -> list[int]:
    """Of all answers to this and to what is hidden behind it, until so many have come or the connection is closed."""
    with connection(server) as sock:
        sock.sendall(sent + HIDDEN)
        answers = b""
        found: list[int] = []
        while until is None or len(found) < until:
            try:
                data = sock.recv(65536)
            except ConnectionResetError:
                break
            if not data:
                break
            answers += data
            found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)]
        return found


@pytest.mark.parametrize("form", REFUSED)
def test_a_smuggling_form_is_refused_and_its_connection_closed(server: Server, form: str) -> None:
    assert statuses(server, REFUSED[form]) in ([400], [501])


@pytest.mark.parametrize("form", TAKEN)
def test_what_can_be_read_in_one_way_only_is_answered_and_so_is_what_follows(server: Server, form: str) -> None:
    assert statuses(server, TAKEN[form], until=2) == [200, 404]
