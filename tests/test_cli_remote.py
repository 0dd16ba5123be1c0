"""`chat` and `complete` at a running server: the same answers as over its API, and one sentence for what goes wrong."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator

import httpx
import pytest
from http_server import Server, metric, serving, wait_until

from headrace.frontend.cli import main
from headrace.frontend.remote import RemoteLLM
from headrace.frontend.sampling_params import SamplingParams
from headrace.ipc.failure import HeadraceError

KEY = "secret"
PROMPT = "the quick 😀"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--api-key", KEY, "--max-model-len", "128", "--root-path", "/api")
    with serving(*options, null_model={"step_delay_s": 0.002}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_complete_prints_what_the_server_answers(server, client, capsys, suffix):
    arguments = ("--max-tokens", "20", "--sampling-seed", "3", "--temperature", "0.7")
    assert main(["complete", PROMPT, "--url", server.url + suffix, "--api-key", KEY, *arguments]) == 0
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 3, "temperature": 0.7}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert capsys.readouterr().out == whole + "\n"


def test_an_answer_may_fill_the_model_s_length(server, client):
    llm = RemoteLLM(server.url, KEY)
    with llm.stream(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True)) as stream:
        outputs = [output.outputs[0] for output in stream]
    count = client.post("/tokenize", json={"prompt": PROMPT}).json()["count"]
    body = {"prompt": PROMPT, "max_tokens": 128 - count, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert "".join(output.text for output in outputs) == whole
    assert outputs[-1].finish_reason == "length"


def test_chat_remembers_what_was_said(server, client, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    assert main(["chat", "--url", server.url, "--max-tokens", "6", "--system", "Be brief."]) == 0
    said = capsys.readouterr().out

    def answer(*messages: tuple[str, str]) -> str:
        told = [{"role": role, "content": content} for role, content in (("system", "Be brief."), *messages)]
        reply = client.post("/v1/chat/completions", json={"messages": told, "max_tokens": 6})
        return str(reply.json()["choices"][0]["message"]["content"])

    first = answer(("user", "one"))
    second = answer(("user", "one"), ("assistant", first), ("user", "two"))
    assert said == f"{first}\n{second}\n"


def test_leaving_an_answer_ends_the_request(server, client):
    with RemoteLLM(server.url, KEY).stream(PROMPT, SamplingParams(ignore_eos=True)) as stream:
        next(iter(stream))
    wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 5, "the abort")


def test_a_server_s_refusal_is_its_own_sentence(server, capsys):
    assert main(["complete", "x", "--url", server.url, "--api-key", "wrong"]) == 1
    assert "the API key is missing or wrong" in capsys.readouterr().err
    with pytest.raises(HeadraceError, match="at least -1"):
        RemoteLLM(server.url, KEY).stream("x", SamplingParams(top_k=-2))


def test_what_is_no_server_or_no_url_is_named(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["complete", "x", "--url", url]) == 1
        assert f"no server answers at {url}: " in capsys.readouterr().err
    for arguments, said in (
        (("--url", "localhost:8000"), "must look like http://127.0.0.1:8000"),
        (("--url", "http://x", "--max-model-len", "64"), "leave out --max-model-len"),
        (("--url", "http://x", "--engine", "ipc:///x"), "leave out --engine"),
        (("--api-key", "x"), "give its --url"),
    ):
        assert main(["complete", "x", *arguments]) == 2
        assert said in capsys.readouterr().err
