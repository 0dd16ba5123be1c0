"""What unusual clients send: old HTTP, half-closed connections, other encodings, slashes; and what they get."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from fake_tokenizers import bundle_of, byte_level_tokenizer
from http_server import read_all
from null_with_tokenizer import VOCAB_SIZE
from patience import wait_until
from server_here import ServerHere, serving_here
from thinned import pairs

from headrace.frontend.http.apis.openai import prompts
from headrace.frontend.http.apis.openai.bodies import TextOffsets, TokenSpelling
from headrace.frontend.http.apis.openai.prompts import count_text
from headrace.frontend.http.server.connection import MAX_HEADER_BYTES
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.messages import Abort

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with serving_here(null_model={"max_model_len": 512, "step_delay_s": 0.002}) as server:
        yield server


@pytest.fixture
def client(server: ServerHere) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def connected(server: ServerHere) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request(body: object, *headers: str, version: str = "1.1", path: str = COMPLETIONS) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


ENDLESS = {"prompt": [5], "ignore_eos": True, "max_tokens": 400}


# --- HTTP/1.0 and half-closed connections ----------------------------------------------------------------------------


def test_a_stream_over_http_10_has_no_chunks_and_ends_with_the_connection(server):
    with connected(server) as sock:
        sock.sendall(request({"prompt": [5], "max_tokens": 3, "stream": True}, version="1.0"))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = body.split(b"\n\n")
    assert all(each.startswith(b"data: ") for each in events[:-1])
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_response_over_http_10_is_the_same_as_over_11(server):
    seen = []
    for version in ("1.0", "1.1"):
        with connected(server) as sock:
            sock.sendall(request({"prompt": [5], "max_tokens": 3, "seed": 1}, "Connection: close", version=version))
            seen.append(json.loads(read_all(sock).partition(b"\r\n\r\n")[2])["choices"])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("version", "streams"), pairs(("1.0", "1.1"), (False, True)))
def test_a_client_that_closes_its_sending_side_gets_the_whole_answer(server, version, streams):
    with connected(server) as sock:
        sock.sendall(request({**ENDLESS, "stream": streams}, version=version))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    final = answer[re.match(rb"(HTTP/1.1 100 Continue\r\n\r\n)*", answer).end() :]
    head, _, body = final.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer[:200]
    assert (b"data: [DONE]" in body) if streams else json.loads(body)["usage"]["completion_tokens"] == 400


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_left_is_still_told_from_one_that_only_stopped_sending(server, streams):
    num_aborts = sum(isinstance(each, Abort) for each in server.sent)
    with connected(server) as sock:
        sock.sendall(request({**ENDLESS, "stream": streams, "n": 2, "temperature": 1}))
        wait_until(lambda: server.requests()[-1].task.sampling.max_tokens == 400, 20, "its start")
    wait_until(lambda: sum(isinstance(each, Abort) for each in server.sent) > num_aborts, 20, "its end")


def test_requests_that_came_before_the_end_are_all_answered(server):
    with connected(server) as sock:
        sock.sendall(2 * request({"prompt": [5], "max_tokens": 2}))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == 2


# --- headers, bodies and paths ---------------------------------------------------------------------------------------


def test_headers_that_are_too_large_are_refused_also_within_one_read(server):
    # Less than the limit beyond it, so that one read brings the request to its end.
    large = [f"x-{index}: {'v' * 1000}" for index in range(MAX_HEADER_BYTES // 1000 + 2)]
    with connected(server) as sock:
        sock.sendall(request({"prompt": [5], "max_tokens": 1}, *large))
        assert read_all(sock).startswith(b"HTTP/1.1 431")
    few = [f"x-{index}: {'v' * 1000}" for index in range(40)]
    with connected(server) as sock:
        sock.sendall(request({"prompt": [5], "max_tokens": 1}, *few, "Connection: close"))
        assert read_all(sock).startswith(b"HTTP/1.1 200")


TEXT = json.dumps({"prompt": "naïve €", "max_tokens": 1, "echo": True}, ensure_ascii=False)
LATIN = json.dumps({"prompt": "naïve", "max_tokens": 1, "echo": True}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("content", "content_type", "expected"),
    [
        (TEXT.encode("utf-8-sig"), "application/json", "naïve €"),
        (TEXT.encode("utf-16"), "application/json", "naïve €"),
        (TEXT.encode("utf-16-be"), "application/json; charset=utf-16BE", "naïve €"),
        (TEXT.encode("utf-16-le"), 'application/json; charset="UTF-16LE"', "naïve €"),
        (TEXT.encode("utf-16-le"), "application/json", "naïve €"),
        (TEXT.encode("utf-16-be"), "application/json; charset=utf-8", "naïve €"),
        (TEXT.encode("utf-32"), "application/json", "naïve €"),
        (TEXT.encode(), "application/json; charset=utf-8", "naïve €"),
        (TEXT.encode(), "text/json", "naïve €"),
        (LATIN.encode("latin-1"), "application/json; charset=iso-8859-1", "naïve"),
    ],
)
def test_a_body_in_the_encodings_of_dotnet_and_powershell_is_read(client, content, content_type, expected):
    answer = client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith(expected)


@pytest.mark.parametrize(
    ("content", "content_type", "said"),
    [
        (LATIN.encode("latin-1"), "application/json", "is not UTF-8; in PowerShell, -ContentType"),
        (TEXT.encode(), "application/json; charset=klingon", "charset 'klingon'; send UTF-8"),
        (TEXT.encode(), "application/json; charset=rot13", "charset 'rot13'; send UTF-8"),
        (b"\xff\xfe{", "application/json", "charset 'utf-16'; send UTF-8"),
    ],
)
def test_a_body_in_another_encoding_is_refused_with_what_to_send(client, content, content_type, said):
    answer = client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_compressed_body_is_refused_by_its_coding(client):
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = client.post(COMPLETIONS, content=LATIN.encode(), headers=headers)
        assert answer.status_code == status, answer.text
        assert status == 200 or f"Content-Encoding: {coding}" in answer.json()["error"]["message"]


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(server):
    whole = request({"prompt": [5], "max_tokens": 1}, "Expect: 100-continue", "Connection: close")
    head, _, body = whole.partition(b"\r\n\r\n")
    with connected(server) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(body)
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_a_path_may_end_in_a_slash(client):
    for path in ("/v1/models/", "/v1/models/null/", "/health/", "/api/tags/"):
        assert client.get(path).json() == client.get(path.rstrip("/")).json()
    assert client.post("/v1/completions/", json={"prompt": [5], "max_tokens": 1}).status_code == 200
    assert client.get("/v1/nothing/").status_code == 404
    assert client.get("/").status_code == 200


# --- counts and offsets ----------------------------------------------------------------------------------------------


def test_routes_that_count_tokens_count_any_length(client):
    text = "the cat sat on the mat. " * 12_000
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    counted = client.post("/v1/messages/count_tokens", json={"model": "null", "messages": [{**HI[0], "content": text}]})
    inputs = client.post("/v1/responses/input_tokens", json={"input": text})
    assert counted.json()["input_tokens"] == inputs.json()["input_tokens"] > 100 * limit
    tokens = client.post("/tokenize", json={"prompt": "the cat sat. " * 100})
    assert tokens.json()["count"] == len(tokens.json()["tokens"]) > limit


def test_a_long_text_is_counted_in_pieces_as_it_would_be_whole(monkeypatch):
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer(VOCAB_SIZE)))
    monkeypatch.setattr(prompts, "_TOKENIZE_AT_ONCE_CHARACTERS", 700)
    for text in ("the cat sat on the mat. " * 400, "naïve €uros 好的 " * 300, "x" * 5000, "\n\n  \n" * 900):
        assert abs(count_text(text, tokenizer, special=False) - tokenizer.count_tokens(text)) <= len(text) // 700
    words = "the cat sat on the mat. " * 400
    assert count_text(words, tokenizer, special=False) == tokenizer.count_tokens(words)


def test_the_offsets_of_log_probabilities_count_whole_characters(client):
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer(VOCAB_SIZE)))
    text = "a€b好"
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
    logprobs = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text), "a character has several tokens"
    expected, so_far = [], b""
    for token_id in token_ids:
        expected.append(len(so_far.decode(errors="ignore")))
        so_far += tokenizer.token_bytes(token_id)
    assert logprobs["text_offset"] == expected
    offsets = TextOffsets(TokenSpelling(tokenizer, as_ids=False), without=set(token_ids[:1]))
    assert [offsets.next(token_id) for token_id in token_ids[:3]] == [0, 0, 0]
