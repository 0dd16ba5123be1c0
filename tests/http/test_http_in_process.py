"""What options and fields do inside a server: in which thread a body is worked on, what goes to the engine."""

from __future__ import annotations

import collections
import gc
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from http_server import ask
from patience import wait_until
from served_routes import ROUTES
from server_here import MODEL, ServerHere, serving_here
from thinned import every

from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Source
from headrace.frontend.http.apis.ollama import routes as ollama_routes
from headrace.frontend.http.apis.openai import prompts
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process import server as http_process
from headrace.frontend.http.server import state as server_state
from headrace.frontend.http.server.connection import Connection
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.exchange import INLINE_BYTES
from headrace.frontend.request import checks
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import Failure

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MOST_BODY_BYTES = 400_000
LONG = "the " * 75_000
USER = [{"role": "user", "content": LONG}]
HI = [{"role": "user", "content": "hi"}]
ONE: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
OLLAMA: dict[str, Any] = {"model": MODEL, "stream": False, "options": {"num_predict": 1}}
LARGE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": LONG, **ONE}),
    ("/invocations", {"prompt": LONG, **ONE}),
    (CHAT, {"messages": USER, **ONE}),
    ("/invocations", {"messages": USER, **ONE}),
    (f"{CHAT}/batch", {"messages": [USER], **ONE}),
    ("/v1/messages", {"messages": USER, **ONE}),
    ("/v1/messages", {"messages": HI, "system": LONG, **ONE}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": USER}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 1}),
    ("/v1/responses", {"input": "hi", "instructions": LONG, "max_output_tokens": 1}),
    ("/v1/responses/input_tokens", {"input": LONG}),
    ("/v1/responses/input_tokens", {"input": "hi", "instructions": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": USER}),
    ("/api/chat", {"messages": USER, **OLLAMA}),
    ("/api/generate", {"prompt": LONG, **OLLAMA}),
    (EMBEDDINGS, {"input": LONG}),
    (EMBEDDINGS, {"input": [LONG, "hi"]}),
    ("/embeddings", {"input": LONG}),
    ("/pooling", {"input": LONG}),
    ("/v2/embed", {"model": MODEL, "texts": [LONG], "input_type": "search_query"}),
    ("/embed", {"inputs": LONG}),
    ("/api/embed", {"model": MODEL, "input": LONG}),
    ("/api/embeddings", {"model": MODEL, "prompt": LONG}),
]
"""A body of 300 KB for each route that takes prompts, in each place that may be long."""
OF_OTHER_MODELS = {"/classify", "/v1/classify", "/predict", "/embed_all", "/embed_sparse", "/similarity", "/"}
"""Routes that this model refuses before anything is tokenised, or that another path stands for; they prepare texts as
embeddings do."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    options = ServeOptions(port=0, max_body_bytes=MOST_BODY_BYTES)
    with serving_here(options, {"max_model_len": 100_000, "vector_width": 4}) as server:
        yield server


@pytest.fixture
def client(server: ServerHere) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Where bodies were decoded, templates written and long texts tokenised: names of threads."""
    seen: dict[str, set[str]] = collections.defaultdict(set)

    def note(owner: Any, name: str, kind: str, size: Callable[[Any], int]) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if size(args) > INLINE_BYTES:
                seen[kind].add(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(RequestDecoder, "decode", "decode", lambda args: len(args[1]))
    note(RequestDecoder, "decode_one_of", "decode", lambda args: len(args[1]))
    note(prompts, "render_chat", "write", lambda args: len(str(args[1])))
    note(Tokenizer, "encode", "tokenise", lambda args: len(args[1]))
    note(Tokenizer, "encode_batch", "tokenise", lambda args: sum(map(len, args[1])))
    note(Tokenizer, "count_tokens", "tokenise", lambda args: len(args[1]))
    return seen


def test_every_route_that_takes_prompts_is_among_those_of_large_bodies() -> None:
    named = {path for path, _ in LARGE} | OF_OTHER_MODELS
    for spec in ROUTES:
        fields = getattr(spec.request, "__struct_fields__", ())
        if spec.method == "POST" and {"prompt", "messages", "input", "inputs", "texts"} & set(fields):
            assert spec.path in named


@pytest.mark.parametrize(("path", "body"), every(3, LARGE), ids=[f"{path} {sorted(body)[0]}" for path, body in LARGE])
def test_a_large_body_is_decoded_and_tokenised_off_the_event_loop_on_every_route(
    client: httpx.Client, threads: dict[str, set[str]], path: str, body: dict[str, Any]
) -> None:
    ask(client, path, **body)
    writes = "messages" in body or path.startswith("/v1/responses")
    kinds = {"decode", "tokenise", "write"} if writes else {"decode", "tokenise"}
    assert set(threads) >= kinds
    for kind, names in threads.items():
        assert all(name.startswith("large-body") for name in names), (kind, names)


CHECKED: list[tuple[str, dict[str, Any], int]] = [
    (COMPLETIONS, {"prompt": "hi", **ONE}, 1),
    (COMPLETIONS, {"prompt": ["hi", "ho"], "n": 2, **ONE}, 2),
    (CHAT, {"messages": HI, **ONE}, 1),
    (f"{CHAT}/batch", {"messages": [HI, HI], **ONE}, 2),
    ("/v1/messages", {"messages": HI, **ONE}, 1),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, 1),
    ("/api/chat", {"messages": HI, **OLLAMA}, 1),
    ("/api/generate", {"prompt": "hi", **OLLAMA}, 1),
    (EMBEDDINGS, {"input": ["hi", "ho"]}, 2),
]
"""Requests, and how many prompts each has."""


@pytest.mark.parametrize(("path", "body", "num_prompts"), CHECKED, ids=[f"{each[0]} {each[2]}" for each in CHECKED])
def test_each_prompt_is_checked_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], num_prompts: int
) -> None:
    lengths, check_length = list[int](), checks._check_length

    def counted(prompt: Prompt, *others: Any) -> int:
        lengths.append(len(prompt.token_ids or ()))
        return check_length(prompt, *others)

    monkeypatch.setattr(checks, "_check_length", counted)
    ask(client, path, **body)
    assert len(lengths) == num_prompts


@pytest.mark.parametrize(("path", "body", "_"), CHECKED[:7], ids=[each[0] for each in CHECKED[:7]])
def test_an_engine_that_is_lost_while_a_request_is_prepared_is_the_reason_of_a_503(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], _: int
) -> None:
    def lost(pool: EnginePool, model: str | None) -> Engine:
        engine = Engine(pool, 0, Source(), is_needed=False)
        engine.names, engine.failure = (MODEL,), Failure(message="the engine was killed")
        return engine

    for module in (server_state, ollama_routes):
        monkeypatch.setattr(module, "engine_for", lost)
    refused = client.post(path, json=body)
    assert refused.status_code == 503
    assert "the engine was killed" in refused.text


def test_long_lines_of_a_batch_are_prepared_off_the_event_loop(
    client: httpx.Client, threads: dict[str, set[str]]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": LONG, **ONE}}
    file = client.post("/v1/files", files={"file": json.dumps(line)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = ask(client, "/v1/batches", **body)

    def ended() -> bool:
        return bool(client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")

    wait_until(ended, 30, "the batch's end")
    assert client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 1
    assert set(threads) >= {"decode", "tokenise"}
    # The thread of the files looks whether any line is a request at all.
    assert all(name.startswith(("large-body", "file-store")) for name in threads["decode"]), threads
    assert all(name.startswith("large-body") for name in threads["tokenise"]), threads


@pytest.mark.parametrize("num_finished", [3, 8])
def test_bodies_beyond_those_that_memory_has_room_for_are_refused_until_others_are_done(
    server: ServerHere, client: httpx.Client, num_finished: int
) -> None:
    """Eight of the largest size are read at a time. The second time shows that those who hung up keep no room."""
    host, port = server.url.removeprefix("http://").split(":")
    small = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
    body = small.ljust(MOST_BODY_BYTES)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def another() -> httpx.Response:
        """So small that it is read, decoded and let go in one turn of the loop: it takes no room from the others."""
        return client.post(COMPLETIONS, content=small, headers={"content-type": "application/json"})

    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(8)]
        for sock in socks:
            sock.sendall(request[:-1])
        wait_until(lambda: another().status_code == 429, 20, "all bodies to be read")
        refused = another()
        assert refused.json()["error"]["code"] == "too_many_bodies"
        assert int(refused.headers["retry-after"]) > 0
        for sock in socks[:num_finished]:
            sock.sendall(request[-1:])
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert another().status_code == 200
    wait_until(lambda: client.get("/load").json() == {"server_load": 0}, 20, "the end of those who hung up")


def test_the_priority_of_a_body_reaches_the_engine(server: ServerHere, client: httpx.Client) -> None:
    num_before = len(server.requests())
    ask(client, COMPLETIONS, prompt=[[5], [6]], priority=3, **ONE)
    ask(client, CHAT, messages=HI, priority=-4, **ONE)
    ask(client, CHAT, messages=HI, **ONE)
    assert [each.priority for each in server.requests()[num_before:]] == [3, 3, -4, 0]


# tests/entrypoints/openai/completion/test_return_tokens_as_ids.py
def test_a_server_names_tokens_by_their_ids_where_its_option_says_so() -> None:
    with serving_here(ServeOptions(port=0, return_tokens_as_token_ids=True)) as server, server.client() as client:
        asked = {"prompt": [5], "logprobs": 1, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        (choice,) = ask(client, COMPLETIONS, **asked)["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        (choice,) = ask(client, COMPLETIONS, **asked, return_tokens_as_token_ids=False)["choices"]
        assert not any("token_id:" in token for token in choice["logprobs"]["tokens"])
        chat = {"messages": HI, "logprobs": True, "max_tokens": 2, "ignore_eos": True}
        (choice,) = ask(client, CHAT, **chat)["choices"]
        assert all(each["token"].startswith("token_id:") for each in choice["logprobs"]["content"])


@pytest.mark.parametrize(("given", "interval_s"), [(None, 10.0), (2.5, 2.5)])
def test_the_load_is_logged_every_ten_seconds_unless_an_option_says_else(
    monkeypatch: pytest.MonkeyPatch, given: float | None, interval_s: float
) -> None:
    told: list[float] = []

    async def log_load(pool: Any, interval_s: float) -> None:
        told.append(interval_s)

    monkeypatch.setattr(http_process, "log_load", log_load)
    with (
        serving_here(ServeOptions(port=0, log_stats_interval=given), logs_stats=True) as server,
        server.client() as own,
    ):
        assert own.get("/health").status_code == 200
        wait_until(lambda: bool(told), 10, "the first line")
    assert told == [interval_s]


def test_what_has_ended_is_freed_without_the_collector(server: ServerHere, client: httpx.Client) -> None:
    """A busy server runs full collections rarely: what waited for one would be hundreds of megabytes by then."""

    def living() -> int:
        return sum(isinstance(each, RequestStream | Connection) for each in gc.get_objects())

    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": [5], "max_tokens": 2, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    assert client.get("/load").json() == {"server_load": 0}
    gc.collect()
    gc.disable()
    try:
        before = living()
        for end in (b"HTTP/1.1 200", b"data: [DONE]\n\n\r\n0\r\n\r\n"):  # within the answer, and after it
            with socket.create_connection((host, int(port)), timeout=60) as sock:
                sock.sendall(request)
                answer = b""
                while end not in answer:
                    answer += sock.recv(65536)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        ask(client, COMPLETIONS, prompt=[5], **ONE)
        wait_until(lambda: living() == before, 20, "the end of all connections and requests")
    finally:
        gc.enable()
