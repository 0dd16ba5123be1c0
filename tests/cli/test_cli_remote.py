"""`chat` and `complete` at a running server: the same answers as over its API, and one sentence for what goes wrong."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_server import Server, address_of_engine, metric, serving
from patience import wait_until, within

from headrace.frontend.cli.main import main
from headrace.frontend.cli.remote import RemoteLLM
from headrace.frontend.request.parameters.sampling_params import SamplingParams
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
    wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "the abort")


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
        (("--url", "http://x", "--no-enable-prefix-caching"), "leave out --no-enable-prefix-caching"),
        (("--url", "http://x", "--enable-lora"), "leave out --enable-lora"),
        (("--url", "http://x", "--enable-dbo"), "--enable-dbo=True is refused"),
        (("--api-key", "x"), "give its --url"),
    ):
        assert main(["complete", "x", *arguments]) == 2
        assert said in capsys.readouterr().err


class Bytes(io.TextIOWrapper):
    """A stdin of these bytes, decoded as Python does in a UTF-8 locale: what is none is kept, or is an error."""

    def __init__(self, data: bytes, errors: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors=errors)


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
def test_input_that_is_no_text_is_said_to_be_none(server, capsys, monkeypatch, errors):
    where = ("--url", server.url, "--api-key", KEY, "--max-tokens", "4")
    monkeypatch.setattr("sys.stdin", Bytes(b"a\xff\xfeb", errors))
    assert main(["complete", *where]) == 2
    assert "is not valid UTF-8\n" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Bytes(b"a\xff\nhello\n", errors))
    assert main(["chat", *where]) == 1
    said = capsys.readouterr()
    assert said.out
    assert "this line is not valid UTF-8; the message was not sent" in said.err
    for arguments in (("complete", "a\udcff"), ("chat", "--system", "a\udcff")):
        assert main([*arguments, *where]) == 2
        assert "is not valid UTF-8\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stdin", "complete_is", "said", "chat_is"),
    [(b"", 2, "PROMPT is missing", 0), (b"\n", 1, "the prompt is empty", 0), (None, 2, "PROMPT is missing", 0)],
)
def test_an_input_that_holds_nothing_is_a_sentence(server, capsys, monkeypatch, stdin, complete_is, said, chat_is):
    """None is a stdin that the caller has closed."""
    where = ("--url", server.url, "--api-key", KEY)
    for command, status in (("complete", complete_is), ("chat", chat_is)):
        monkeypatch.setattr("sys.stdin", None if stdin is None else Bytes(stdin, "strict"))
        assert main([command, *where]) == status
        assert (said in capsys.readouterr().err) == bool(status)


def test_an_output_that_cannot_be_written_is_no_traceback(server):
    """A reader that has had enough, a full disk, and a stdout that the caller has closed."""
    complete = f"headrace complete x --url {server.url} --api-key {KEY} --max-tokens 100 --ignore-eos"
    no_space = "headrace: cannot write the output: there is no space left on the device\n"
    expected = {
        f"{complete} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}": (1, ""),
        f"{complete} >/dev/full": (1, no_space),
        f"{complete} >&-": (0, ""),
        f"{complete} --url nonsense 2>&- | grep -c .": (1, ""),
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    programs = [
        subprocess.Popen(["bash", "-c", each], stderr=subprocess.PIPE, text=True, env={**os.environ, "PATH": path})
        for each in expected
    ]
    for command, program in zip(expected, programs, strict=True):
        _, said = program.communicate(timeout=within(20))
        assert (program.returncode, said) == expected[command], command


@pytest.mark.system
def test_ctrl_c_ends_every_command_without_a_traceback(tmp_path):
    (tmp_path / "in").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "ignore_eos": true, '
        '"max_tokens": 9000}}\n'
    )
    with serving(null_model={"step_delay_s": 0.05}) as server, server.client() as client:
        engine = address_of_engine(server)
        commands = [
            ("chat", "--url", server.url, "--max-tokens", "9000", "--ignore-eos"),
            ("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--engine", engine),
            ("bench", "serve", "--base-url", server.url, "--num-prompts", "1", "--random-output-len", "9000",
             "--random-vocab-size", "400", "--ignore-eos", "--no-machine-probe"),
        ]  # fmt: skip
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "headrace", *command],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
            for command in commands
        ]  # fmt: skip
        for program in programs:
            assert program.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                program.stdin.write(b"hello\n")
                program.stdin.flush()
        wait_until(lambda: metric(client, "headrace:num_requests_running") == len(commands), 20, "all to run")
        for program in programs:
            program.send_signal(signal.SIGINT)
        for command, program in zip(commands, programs, strict=True):
            _, said = program.communicate(timeout=within(10))
            assert (program.returncode, b"Traceback" in said) == (130, False), (command, said.decode())
        wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "the aborts")
