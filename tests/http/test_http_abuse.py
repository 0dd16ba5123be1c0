"""What a hostile or careless client sends: it is refused in a sentence, and costs others neither time nor memory.

Times are processor seconds of this process, where a machine's load does not show. benchmarks/abuse.py is the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_tokenizers import bundle_of, byte_level_tokenizer
from http_server import Server, ask, connection, read_all, serving
from patience import wait_until
from processor_time import least_processor_s
from thinned import every

from headrace.core.options.engine_options import Options
from headrace.core.options.option import Secret
from headrace.executor.checkpoints.hub import HubChoice
from headrace.executor.placement.cluster_proof import Proofs, cluster_key
from headrace.frontend.http.apis.openai.prompts import tokenize_texts
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, CompletionRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.keys import read_admin_keys, read_keys
from headrace.frontend.http.server.access import Keys
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.errors import LONGEST_MESSAGE, LONGEST_PARAM, ApiError
from headrace.frontend.http.server.exchange import MOST_CONTAINERS, LargeBodies, check_num_values
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import OptionError
from headrace.ipc.process.gc_pauses import CollectorHold
from headrace.ipc.transport.keys import make_key_file
from headrace.ipc.transport.keys import read_keys as read_engine_file

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
READ_TIMEOUT_S = 2.0
MOST_LEFT_BYTES = 150 << 20
LONG_NAME = " - at `$" * 40_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--read-timeout", str(READ_TIMEOUT_S), "--enable-log-requests", "--max-model-len", "4096")
    with serving(*arguments, null_model={"step_delay_s": 0.002}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def memory_bytes(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST %b HTTP/1.1" % path.encode(), b"host: localhost", b"content-type: application/json")
    return b"\r\n".join((*lines, b"content-length: %d" % len(body), *headers, b"", body))


# --- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body"),
    every(
        2,
        [
            (CompletionRequest, {"prompt": "x", LONG_NAME: 1}),
            (CompletionRequest, {"prompt": "x", "stream": True, "stream_options": {LONG_NAME: 1}}),
            (CompletionRequest, {"prompt": "x", "stream_options": {"`" * 400_000: 1}}),
            (CompletionRequest, {"prompt": "x", "logit_bias": {LONG_NAME: "x"}}),
            (ChatCompletionRequest, {"messages": [{"role": "user", LONG_NAME: 1}]}),
            (ChatCompletionRequest, {"messages": [{"role": {LONG_NAME: 1}}]}),
            (ChatCompletionRequest, {"messages": [], "m" * 400_000: 1}),
            (CompletionRequest, {"prompt": "x", **{f"temperatur{'tem' * 10}{i}": 1 for i in range(250)}}),
            (CompletionRequest, {"prompt": "x", **{f"k{i}": 1 for i in range(100_000)}}),
        ],
    ),
)
def test_a_long_name_costs_no_time_and_is_not_repeated(kind, body):
    encoded = json.dumps(body).encode()
    refusals = list[ApiError]()

    def decode() -> None:
        with pytest.raises(ApiError) as refused:
            RequestDecoder(strict=True).decode(encoded, kind)
        refusals.append(refused.value)

    assert least_processor_s(decode, 0.5) < 0.5
    assert len(refusals[0].body.message) <= LONGEST_MESSAGE
    assert len(refusals[0].body.param or "") <= LONGEST_PARAM


def test_long_names_and_values_are_cut_in_every_answer(client):
    for path, body in (
        (COMPLETIONS, {"prompt": "x", "model": "m" * 300_000}),
        (COMPLETIONS, {"prompt": "x", "stop": ["s" * 300_000] * 3}),
        (COMPLETIONS, {"prompt": "x", "request_id": "r" * 300_000}),
        (COMPLETIONS, {"prompt": "x", "stream_options": {LONG_NAME: 1}}),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1] * 1000}),
        (COMPLETIONS, {"prompt": "x", "bad_words": [" " * 50_000]}),
        (CHAT, {"messages": [{"role": "r" * 300_000, "content": [{"type": "t" * 300_000}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages" * 9999: 1}}),
    ):
        answer = client.post(path, json={**body, "max_tokens": 1})
        assert answer.status_code in (200, 400, 404), answer.text[:300]
        assert len(answer.content) < 2 * LONGEST_MESSAGE or answer.status_code == 200
    assert client.get("/" + "v1/" * 10_000).status_code == 404


def test_a_large_body_is_decoded_and_tokenised_off_the_event_loop():
    async def threads_of(*sizes: int) -> list[str]:
        bodies = LargeBodies(1 << 20)
        return [await bodies.run(b"x" * size, lambda body: threading.current_thread().name) for size in sizes]

    small, large = asyncio.run(threads_of(100, 300_000))
    assert small == threading.current_thread().name
    assert large.startswith("large-body")


@pytest.mark.parametrize("body", [b"[5]," * 300, b'"a",' * 300, b"{}," * 300])
def test_a_small_body_of_many_lists_or_texts_is_prepared_off_the_event_loop(body):
    """Each may be a prompt, which takes some ten microseconds."""

    async def thread_of(body: bytes) -> str:
        return await LargeBodies(1 << 20).run(body, lambda body: threading.current_thread().name)

    assert asyncio.run(thread_of(body)).startswith("large-body")
    assert asyncio.run(thread_of(body[: len(body) // 2])) == threading.current_thread().name


def test_the_collector_keeps_still_while_large_bodies_are_worked_on_and_not_for_ever(monkeypatch):
    bodies, both = LargeBodies(1 << 20), threading.Barrier(2, timeout=60)

    def work() -> bool:
        both.wait()
        return gc.isenabled()

    assert [each.result() for each in [bodies.threads.submit(work) for _ in range(2)]] == [False, False]
    bodies.threads.shutdown()
    assert gc.isenabled()
    hold, collected = CollectorHold(longest_s=0.0), list[int]()
    monkeypatch.setattr(gc, "collect", collected.append)
    with hold, hold:
        assert collected == [1], "one block followed on another for longer than it may"
    assert gc.isenabled()


@pytest.mark.parametrize("value", [b"[]", b'""', b'{"a":1}'])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(value):
    body = b'{"prompt":[' + b",".join([value] * (MOST_CONTAINERS + 10)) + b"]}"
    with pytest.raises(ApiError, match="several requests") as refused:
        check_num_values(body)
    assert refused.value.status == 413
    check_num_values(b'{"prompt":[' + b",".join([value] * (MOST_CONTAINERS // 4)) + b"]}")


def test_rules_on_tokens_times_outputs_are_bounded(client):
    rules = {str(token): 1 for token in range(300)}
    refused = client.post(COMPLETIONS, json={"prompt": [[5]] * 2048, "max_tokens": 1, "logit_bias": rules})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logit_bias"


def test_what_each_output_takes_to_the_engine_is_bounded_together(client):
    """One body of 1 MB made 2 GB of messages."""
    form, prompts = {"regex": "a" * 1_000_000}, [[5]] * 2048
    chats = [[{"role": "user", "content": "x"}]] * 2048
    for path, body, param in (
        (COMPLETIONS, {"prompt": prompts, "structured_outputs": form}, "structured_outputs"),
        (
            COMPLETIONS,
            {"prompt": prompts, "structured_outputs": {"json": {"enum": ["a" * 50_000]}}},
            "structured_outputs",
        ),
        (COMPLETIONS, {"prompt": prompts, "bad_words": ["ab " * 100]}, "bad_words"),
        (COMPLETIONS, {"prompt": prompts, "vllm_xargs": {"a": "x" * 20_000}}, "vllm_xargs"),
        (COMPLETIONS, {"prompt": prompts, "cache_salt": "x" * 2_000_000}, "cache_salt"),
        (CHAT + "/batch", {"messages": chats, "structured_outputs": form}, "structured_outputs"),
    ):
        refused = client.post(path, json={**body, "max_tokens": 1})
        assert refused.status_code == 400, refused.text[:300]
        assert refused.json()["error"]["param"] == param


# --- memory --------------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(client, server):
    before = memory_bytes(server)
    for text in ("x" * 8_000_000, "ab " * 2_000_000):
        for path, body in (
            (COMPLETIONS, {"prompt": text, "max_tokens": 1}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_tokens": 1}),
            ("/tokenize", {"prompt": text}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
    wait_until(lambda: memory_bytes(server) - before < 60 << 20, 30, "giving memory back")


@pytest.mark.parametrize(
    ("count", "most_left_bytes"),
    [(150, MOST_LEFT_BYTES // 3), pytest.param(1000, MOST_LEFT_BYTES, marks=pytest.mark.system)],
)
def test_a_thousand_bodies_of_every_size_leave_the_server_as_it_was(client, server, count, most_left_bytes):
    """Sizes from one byte to the limit, each as often in every power of two; texts, tokens, conversations, nonsense.

    Fewer of them have less to leave: the bodies of 150 are some 60 MB.
    """
    limit = ServeOptions().max_body_bytes
    before, peak = memory_bytes(server), 0
    for number in range(count):
        size = max(1, round(limit ** ((number // 5 + 1) / (count // 5))))
        path, body = _body_of(number % 5, size)
        assert len(body) <= limit
        assert client.post(path, content=body, headers=JSON).status_code < 500
        peak = max(peak, memory_bytes(server))
    print(f"peak {(peak - before) >> 20} MiB, left {(memory_bytes(server) - before) >> 20} MiB above the start")
    wait_until(lambda: memory_bytes(server) - before < most_left_bytes, 30, "giving memory back")


def test_a_refused_body_is_freed_without_a_collection_of_garbage(client, server):
    """The traceback of the error that refuses it refers to what the error went through."""
    path, body = _body_of(1, 5 << 20)
    assert client.post(path, content=body, headers=JSON).status_code == 413
    before = memory_bytes(server)
    for _ in range(8):
        assert client.post(path, content=body, headers=JSON).status_code == 413
    wait_until(lambda: memory_bytes(server) - before < 20 << 20, 5, "freeing bodies")


def _body_of(kind: int, size: int) -> tuple[str, bytes]:
    """A body of so many bytes, or a little more where its frame alone is longer."""
    frames = {
        0: (COMPLETIONS, b'{"max_tokens":1,"prompt":"', b"a ", b'"}'),
        1: (COMPLETIONS, b'{"max_tokens":1,"prompt":[5', b",5", b"]}"),
        2: (CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"', b"ab", b'"}]}'),
        3: (
            CHAT,
            b'{"max_tokens":1,"messages":[',
            b'{"role":"user","content":"x"},',
            b'{"role":"user","content":"y"}]}',
        ),
        4: ("/tokenize", b"", b"\x7b\x22", b""),
    }
    path, head, piece, tail = frames[kind]
    return path, head + piece * max(0, (size - len(head) - len(tail)) // len(piece)) + tail


def test_the_length_of_a_text_is_bounded_by_its_vocabulary_and_probed_by_its_beginning():
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer(400)))
    longest = tokenizer.longest_token

    def tokens_of(text: str, max_tokens: int) -> int:
        (token_ids,) = tokenize_texts([text], tokenizer, special=False, max_tokens=max_tokens, param="prompt")
        return len(token_ids)

    assert tokens_of("a" * 100, 100) <= 100
    with pytest.raises(ApiError, match=r"maximum context length is 10 tokens.*characters"):
        tokens_of("a" * (10 * longest + 1), 10)


def test_trailers_and_requests_sent_ahead_take_no_memory(server):
    before = memory_bytes(server)
    body = json.dumps({"prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    chunked = post(COMPLETIONS, b"", b"transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    cases = (
        (chunked + b"%x\r\n%b\r\n0\r\n" % (len(body), body), b"a: %b\r\n" % (b"b" * 1000)),
        (chunked + b"%x\r\n%b\r\n0\r\na: " % (len(body), body), b"b" * 1000),
        (post(COMPLETIONS, body), b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20),
        (post(COMPLETIONS, body) + b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"a: %b\r\n" % (b"b" * 1000)),
        (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 17,
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20,
        ),
    )
    for head, more in cases:
        with connection(server) as sock:
            sock.sendall(head)
            sock.settimeout(1.0)
            sent = 0
            with contextlib.suppress(OSError):  # closed, or read no further
                while sent < 40 << 20:
                    sent += sock.send(more * 60)
            assert memory_bytes(server) - before < 30 << 20, (head[:100], sent)


def test_a_whole_answer_that_nobody_reads_is_let_go(client, server):
    def connections() -> int:
        kind = psutil.Process(server.process.pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in kind)

    before = connections()
    asked = {"prompt": [5] * 4000, "echo": True, "max_tokens": 1, "n": 128, "logprobs": 1}
    with connection(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(post(COMPLETIONS, json.dumps(asked).encode()))  # some 30 MB, more than the kernel takes
        wait_until(lambda: connections() > before, 60, "their connections")
        wait_until(lambda: connections() <= before, 120, "letting them go")


# --- HTTP itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["whole", "split", "chunked"])
def test_a_wish_for_http_2_is_ignored_and_the_body_read(server, length):
    """Java's HttpClient sends it with every first request."""
    body = json.dumps({"prompt": [5], "max_tokens": 3, "seed": 1}).encode()
    wish = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__")
    with connection(server) as sock:
        if length == "chunked":
            head = post(COMPLETIONS, b"", b"transfer-encoding: chunked", *wish).replace(b"content-length: 0\r\n", b"")
            sock.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        elif length == "split":
            request = post(COMPLETIONS, body, *wish)
            for part in (request[:40], request[40:-20], request[-20:]):
                sock.sendall(part)
                time.sleep(0.05)
        else:
            sock.sendall(post(COMPLETIONS, body, *wish))
        first = sock.recv(65536)
        assert first.startswith(b"HTTP/1.1 200"), first
        sock.sendall(post(COMPLETIONS, body, b"connection: close"))  # and the connection goes on
        assert b"HTTP/1.1 200" in read_all(sock)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"505"),
        (b"GET /health HTTP/0.9\r\nhost: localhost\r\n\r\n", b"505"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"405"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", b"200"),
    ],
)
def test_what_is_no_proper_request_is_refused(server, request_head, status):
    with connection(server) as sock:
        sock.sendall(request_head)
        assert sock.recv(65536).split(b" ")[1] == status


def test_pipelined_requests_are_answered_in_order(server):
    with connection(server) as sock:
        bodies = [json.dumps({"prompt": [5], "max_tokens": n, "ignore_eos": True}).encode() for n in (9, 1, 5)]
        for body in bodies:
            sock.sendall(post(COMPLETIONS, body))
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answers = read_all(sock)
        assert re.findall(rb'"completion_tokens":(\d)', answers) == [b"9", b"1", b"5"]
        assert answers.endswith(b'{"status":"ok"}')


# --- keys, logs and values -----------------------------------------------------------------------------------------


def test_a_line_of_the_log_cannot_be_forged(client, server):
    client.get("/a%0aERROR%20forged%1b[31m%E2%80%AE")
    server.wait_log(r"GET /a\\nERROR forged\\x1b\[31m\\u202e: 404")


def test_a_key_of_any_characters_opens(monkeypatch):
    with serving("--api-key", "schlüssel-π") as server, server.client() as client:
        for key, status in (("schlüssel-π", 200), ("schlüssel", 401)):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert client.get("/v1/models", headers=headers).status_code == status


def test_a_secret_that_ends_in_a_line_break_is_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Kubernetes' secrets and of `echo secret > file` do; an editor of Windows adds a byte order mark."""
    monkeypatch.setenv("HEADRACE_API_KEY", "secret\n")
    assert read_keys(ServeOptions()) == ["secret"]
    monkeypatch.setenv("HEADRACE_CLUSTER_KEY", "secret\r\n")
    assert cluster_key(Options()) == "secret"
    for text in ("mine\r\n", "\ufeffmine\r\n", " \ufeff mine"):
        monkeypatch.setenv("HEADRACE_API_KEY", text)
        monkeypatch.setenv("HEADRACE_ADMIN_API_KEY", text)
        monkeypatch.setenv("HEADRACE_CLUSTER_KEY", text)
        assert read_keys(ServeOptions()) == read_admin_keys(ServeOptions()) == [cluster_key(Options())] == ["mine"]
        assert read_keys(ServeOptions(api_key=(Secret(text),))) == ["mine"]
        assert HubChoice.of(Options(hf_token=Secret(text))).token == Secret("mine")
    file = tmp_path / "keys"
    file.write_bytes("\ufefffirst\r\nsecond\r\n".encode())
    assert read_keys(ServeOptions(api_key_file=str(file))) == ["first", "second"]
    make_key_file(keys := tmp_path / "engine.keys")
    before = read_engine_file(keys)
    keys.write_bytes("\ufeff".encode() + keys.read_bytes())
    assert read_engine_file(keys) == before


def test_a_secret_of_bytes_that_are_no_text_is_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a variable of a system whose texts are in Latin-1 has it."""
    monkeypatch.setenv("HEADRACE_API_KEY", "schl\udcfcssel")
    keys = Keys(read_keys(ServeOptions()))
    assert keys.find(b"schl\xfcssel") is not None
    assert keys.find("schlüssel".encode()) is None
    monkeypatch.setenv("HEADRACE_CLUSTER_KEY", "schl\udcfcssel")
    assert Proofs(cluster_key(Options()), b"core", b"node")


@pytest.mark.parametrize("name", ["HEADRACE_API_KEY", "VLLM_API_KEY"])
def test_a_key_of_the_environment_guards_and_an_empty_one_opens_nothing(monkeypatch, name):
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert read_keys(ServeOptions()) == []
    monkeypatch.setenv(name, "secret")
    assert read_keys(ServeOptions()) == ["secret"]
    assert read_keys(ServeOptions(api_key=(Secret("mine"),))) == ["mine"]
    monkeypatch.setenv(name, " ")
    with pytest.raises(OptionError, match=name):
        read_keys(ServeOptions())
    with pytest.raises(OptionError, match="api_key is empty"):
        read_keys(ServeOptions(api_key=(Secret(""),)))


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


@pytest.mark.parametrize("depth", [100, 500, 900, 5000])
def test_tools_of_any_depth_are_an_answer_or_a_refusal(client, depth):
    tool = {"type": "function", "function": {"name": "f", "parameters": None}}
    encoded = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [tool]})
    deep = '{"properties":' * depth + "{}" + "}" * depth
    answer = client.post(CHAT, content=encoded.replace("null", deep), headers=JSON)
    assert answer.status_code in (200, 400), answer.text[:300]


@pytest.mark.parametrize("name", ["self", "conversation", "template", "add_generation_prompt", "loop", "tokenizer"])
def test_a_template_variable_may_have_any_name(client, name):
    answer = client.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    )
    assert answer.status_code in (200, 400), answer.text[:300]


def test_after_all_this_the_server_serves_as_before(client):
    assert ask(client, COMPLETIONS, prompt=[5], max_tokens=2)["usage"]["completion_tokens"] == 2
    assert client.get("/load").json() == {"server_load": 0}
