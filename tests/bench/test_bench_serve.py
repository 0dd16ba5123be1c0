"""`headrace bench serve` against servers that behave and misbehave: its schedule, its figures, its counts by cause."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_server as fake
import pytest
import tokenizers
from http_server import Server, serving
from server_here import serving_here
from thinned import every

from headrace.core.options.option import Secret
from headrace.frontend.bench.options import ResultOptions
from headrace.frontend.bench.results import record
from headrace.frontend.bench.results.metrics import number
from headrace.frontend.bench.traffic.http_client import Pool, Target
from headrace.frontend.bench.traffic.load import Load, LoadResult
from headrace.frontend.cli.main import main
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError

SHORT = ("--random-input-len", "5", "--random-output-len", "4")


@pytest.fixture(scope="module")
def chat_server() -> Iterator[Server]:
    """Ours: it has the routes of its tokenizer."""
    with serving() as server:
        yield server


def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the result file, and what was printed."""
    path = tmp_path / "result.json"
    status = main(["bench", "serve", *arguments, "--no-machine-probe", "--output-json", str(path)])
    printed = capsys.readouterr()
    return status, json.loads(path.read_text()) if path.exists() else {}, printed.out + printed.err


def test_a_proper_server_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "20", *SHORT, "--ignore-eos", "--temperature", "0")
        status, record, printed = bench(capsys, tmp_path, *arguments, "--goodput", "ttft:60000", "--seed", "3")
    figures = record["results"]
    assert status == 0
    assert (figures["completed"], figures["failed"], figures["errors"]) == (20, 0, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20 * 7, 20 * 4)  # as the server counts
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= figures[f"median_{name}_ms"] <= figures[f"p99_{name}_ms"] <= figures[f"max_{name}_ms"]
    assert len(server.bodies) == 20
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("fake", 4, True, 0)
    assert len(body["prompt"]) == 5
    samples = record["samples"]["requests"]
    assert [len(sample["gaps_s"]) for sample in samples] == [3] * 20
    assert record["seed"] == 3
    assert record["machine"]["CPU"]
    assert record["versions"]["headrace"]
    assert "20 of 20 requests completed" in printed
    assert "time to first token" in printed


def test_names_that_vllms_command_lines_have_pass_and_requests_are_numbered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "2", *SHORT, "--request-id-prefix", "mine-")
        habits = ("--trust-remote-code", "--tokenizer-mode", "auto", "--skip-tokenizer-init")
        status, _, printed = bench(capsys, tmp_path, *arguments, *habits)
    assert status == 0
    assert "--tokenizer-mode has no effect: --tokenizer names" in printed
    assert sorted(re.findall(r"(?m)^X-Request-Id: (.*)\r$", "".join(server.heads))) == ["mine-0", "mine-1"]
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--enforce-eager"])
    assert "--enforce-eager is no option of this command, but of another" in capsys.readouterr().err


@pytest.mark.parametrize("how", every(2, ["random", "round-robin"]))
def test_requests_are_spread_over_adapters(how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("--num-prompts", "12", *SHORT, "--lora-modules", "sql", "chat", "--lora-assignment", how, "--seed", "3")
    orders = []
    for _ in range(2):
        with fake.FakeServer(fake.stream) as server:
            status, record, _ = bench(capsys, tmp_path, "--base-url", server.url, "--max-concurrency", "1", *asked)
        assert status == 0
        assert record["arguments"]["lora_modules"] == ["sql", "chat"]
        orders.append([body["model"] for body in server.bodies])
    assert orders[0] == orders[1], "the same seed, the same adapters"
    assert set(orders[0]) == {"sql", "chat"}
    assert (orders[0] == ["sql", "chat"] * 6) == (how == "round-robin")


def test_a_profile_is_recorded_around_the_load_and_its_refusal_is_told(
    chat_server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "1", *SHORT, "--profile")
        assert bench(capsys, tmp_path, *arguments)[0] == 0
    assert [head.split()[1] for head in server.heads] == ["/start_profile", "/v1/completions", "/stop_profile"]
    assert main(["bench", "serve", "--base-url", chat_server.url, *arguments[2:]]) == 1
    assert "/start_profile answered 404" in capsys.readouterr().err


def test_chat_is_spoken_too_and_a_role_is_no_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "Hello", "output_tokens": 3}\n')
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", f"{server.url}/v1", "--backend", "openai-chat", "--dataset-name", "custom")
        status, record, _ = bench(
            capsys, tmp_path, *arguments, "--dataset-path", str(lines), "--num-prompts", "2", "--save-detailed"
        )
    assert status == 0
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    (first, _) = record["samples"]["requests"]
    assert first["text"] == "word0 word1 word2 "
    assert len(first["gaps_s"]) == 2


async def vectors(server: fake.FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    await fake.answer_json(writer, 200, {"data": [], "usage": {"prompt_tokens": 11, "total_tokens": 11}})


async def busy(server: fake.FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    await fake.answer_json(writer, 429, {"error": {"message": "too many"}})


@pytest.mark.parametrize(
    ("backend", "path", "body"),
    [
        ("openai-embeddings", "/v1/embeddings", {"input": 2, "truncate_prompt_tokens": -1}),
        ("vllm-pooling", "/pooling", {"input": 2, "truncate_prompt_tokens": -1}),
        ("infinity-embeddings", "/embeddings", {"input": 2}),
        ("vllm-rerank", "/v1/rerank", {"documents": 2, "query": None, "truncate_prompt_tokens": -1}),
        ("openai-embeddings-chat", "/v1/embeddings", {"messages": None, "truncate_prompt_tokens": -1}),
    ],
)
def test_vectors_and_scores_are_asked_for_as_vllm_asks(
    backend: str, path: str, body: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dataset = "random-rerank" if backend == "vllm-rerank" else "random"
    several = () if backend == "openai-embeddings-chat" else ("--random-batch-size", "2")
    with fake.FakeServer(vectors) as server:
        arguments = ("--base-url", server.url, "--backend", backend, "--dataset-name", dataset, *several)
        status, record, printed = bench(
            capsys, tmp_path, *arguments, "--tokenizer", str(tmp_path), "--num-prompts", "3", "--random-input-len", "5"
        )
    assert status == 0
    assert [head.split()[1] for head in server.heads] == [path] * 3
    (first, *_) = server.bodies
    assert first.keys() == {"model", *body}
    for name, value in body.items():
        if value == 2:
            assert len(first[name]) == 2
            assert all(len(text.split()) == 5 for text in first[name])
        elif value is not None:
            assert first[name] == value
    figures = record["results"]
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (3, 33, 0)
    assert 0 < figures["median_e2el_ms"] <= figures["max_e2el_ms"]
    assert "median_ttft_ms" not in figures, "there is no first token"
    assert "output tokens/s" not in printed


def test_a_refusal_of_vectors_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(busy) as server:
        arguments = ("--base-url", server.url, "--backend", "openai-embeddings", "--num-prompts", "2", *SHORT)
        status, record, _ = bench(capsys, tmp_path, *arguments)
    assert status == 1
    assert record["results"]["errors"] == {"HTTP 429": {"count": 2, "example": "too many"}}


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition"])
def test_prompts_of_chat_are_drawn_with_the_server_s_own_tokenizer(
    dataset: str, chat_server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = ("--random-input-len", "12", "--prefix-repetition-prefix-len", "8", "--prefix-repetition-suffix-len", "4")
    arguments = ("--base-url", chat_server.url, "--backend", "openai-chat", "--dataset-name", dataset, *lengths)
    short = ("--output-len", "30", "--num-prompts", "12", "--ignore-eos", "--random-vocab-size", "300")
    status, record, _ = bench(capsys, tmp_path, *arguments, *short)
    assert (status, record["results"]["completed"]) == (0, 12)
    told = [sample["num_prompt_tokens"] for sample in record["samples"]["requests"]]
    with chat_server.client() as client:
        body = {"messages": [{"role": "user", "content": ""}]}
        template_tokens = client.post("/tokenize", json=body).json()["count"]
    assert all(abs(count - template_tokens - 12) <= 4 for count in told), "of text that bytes made"


def test_a_server_that_cannot_make_texts_is_named(chat_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with fake.FakeServer(fake.stream) as server:
        chat = ("bench", "serve", "--backend", "openai-chat", "--num-prompts", "1", "--no-machine-probe")
        assert main([*chat, "--base-url", server.url]) == 2
        said = capsys.readouterr().err
        assert f"{server.url}/detokenize, which would make them of the tokens that were drawn, " in said
        assert "give --tokenizer FOLDER" in said
        assert main([*chat, "--base-url", chat_server.url, "--random-vocab-size", "100000"]) == 2
        assert "--random-vocab-size" in capsys.readouterr().err


FAULTS = {
    "HTTP 429": fake.refuse(429),
    "HTTP 500": fake.refuse(500),
    "HTTP 503": fake.refuse(503),
    "connection dropped": fake.send_and_close(fake.HEAD + fake.piece("one")),
    "cut short": fake.send_and_close(fake.HEAD + fake.piece("one") + b"0\r\n\r\n"),
    "no tokens": fake.send_and_close(fake.HEAD + fake.event(b"[DONE]") + b"0\r\n\r\n"),
    "error event": fake.send_and_close(fake.HEAD + fake.event({"error": {"message": "it broke"}}) + b"0\r\n\r\n"),
    "stalled": fake.send_and_stall(fake.HEAD + fake.piece("one")),
}
GARBAGE = {
    "not HTTP": b"\x16\x03\x01 what is this\r\n\r\n",
    "no JSON": fake.HEAD + fake.event(b"{nonsense") + b"0\r\n\r\n",
    "no text": fake.HEAD + fake.event(b'"\xff\xfe"') + b"0\r\n\r\n",
    "no events": fake.HEAD + fake.chunk(b"<html>hello</html>\n\n") + b"0\r\n\r\n",
    "a wrong type": fake.HEAD + fake.event({"choices": 3}) + b"0\r\n\r\n",
    "a bad chunk": fake.HEAD + b"zz\r\nhello\r\n",
    "no stream": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("cause", every(2, FAULTS))
def test_a_fault_is_counted_by_its_cause(cause: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(FAULTS[cause]) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "3", *SHORT, "--stall-timeout", "0.4")
        status, record, printed = bench(capsys, tmp_path, *arguments)
    assert {each: error["count"] for each, error in record["results"]["errors"].items()} == {cause: 3}
    assert status == 1
    assert f"{cause}: 3" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_counted_as_such(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(fake.send_and_close(GARBAGE[kind])) as server:
        _, record, _ = bench(capsys, tmp_path, "--base-url", server.url, "--num-prompts", "2", *SHORT)
    assert {each: error["count"] for each, error in record["results"]["errors"].items()} == {"garbage": 2}


def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else can have the port
        bound.bind(("127.0.0.1", 0))
        where = ("--port", str(bound.getsockname()[1]), "--num-prompts", "3", *SHORT)
        status, record, printed = bench(capsys, tmp_path, *where)
        assert status == 1
        assert record == {}
        assert "does not say which models it serves (connection refused" in printed
        status, record, printed = bench(capsys, tmp_path, *where, "--model", "any")
    assert status == 1
    assert {each: error["count"] for each, error in record["results"]["errors"].items()} == {"connection refused": 3}


def test_faults_of_some_requests_leave_the_others_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async def every_second(server: fake.FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        behave = fake.stream if len(server.bodies) % 2 else fake.refuse(429)
        await behave(server, writer, body)

    with fake.FakeServer(every_second) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "10", *SHORT, "--max-concurrency", "1")
        status, record, _ = bench(capsys, tmp_path, *arguments)
    figures = record["results"]
    assert status == 0
    assert (figures["completed"], figures["failed"]) == (5, 5)
    assert figures["errors"]["HTTP 429"] == {"count": 5, "example": "no, 429"}
    assert figures["max_concurrent_requests"] == 1
    assert server.num_connections == 1  # kept alive


def test_a_kept_connection_that_the_server_closed_is_no_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def close_after(server: fake.FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await fake.stream(server, writer, body)
        writer.close()

    with fake.FakeServer(close_after) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "6", *SHORT, "--max-concurrency", "1")
        _, record, _ = bench(capsys, tmp_path, *arguments)
    assert record["results"]["completed"] == 6


def test_the_schedule_is_kept_when_the_server_answers_nobody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No coordinated omission: a generator that waited for answers would send no second request here, ever."""
    count, rate = 60, 200.0
    with fake.FakeServer(fake.answer_nobody_until(count)) as server:
        arguments = ("--base-url", server.url, "--num-prompts", str(count), *SHORT, "--request-rate", str(rate))
        status, record, _ = bench(capsys, tmp_path, *arguments, "--stall-timeout", "5")
        arrivals_s = list(server.arrivals_s)
    figures, samples = record["results"], record["samples"]["requests"]
    assert status == 0
    assert figures["completed"] == figures["max_concurrent_requests"] == count
    due_s = [sample["due_s"] for sample in samples]
    assert due_s == sorted(due_s)
    assert due_s[-1] == pytest.approx(count / rate, abs=1e-5)
    # As the server saw it: nothing came before it was due, and the wait of the first counts in full.
    start_s = arrivals_s[0] - samples[0]["sent_s"]
    assert all(arrived_s - start_s > due - 0.05 for arrived_s, due in zip(arrivals_s, due_s, strict=True))
    first, last = samples[0], samples[-1]
    assert first["ttft_s"] > last["due_s"] - first["due_s"]
    assert all(sample["sent_s"] >= sample["due_s"] for sample in samples)
    for sample in samples:  # latency is counted from when it was due, not from when it was sent
        assert sample["ttft_s"] >= sample["sent_s"] - sample["due_s"] - 1e-5


def test_a_late_generator_shows_in_the_latencies() -> None:
    """It is held up on purpose in mid-run: what was due meanwhile must not look fast."""
    held_s = 0.3

    def hold_up(load: Load) -> None:
        if load.num_done:
            time.sleep(held_s)

    async def run(server: fake.FakeServer) -> LoadResult:
        target = Target(server.url, {})
        pool = Pool(target, connect_timeout_s=5, stall_timeout_s=20, request_timeout_s=20)
        request = target.post("/v1/completions", b'{"max_tokens": 2}')
        load = Load(
            pool, [request] * 100, due_s=[0.01 * at for at in range(100)], max_concurrency=None, keep_text=False
        )
        try:
            return await load.run(hold_up)
        finally:
            await pool.close()

    with fake.FakeServer(fake.stream) as server:
        result = asyncio.run(run(server))
    assert max(result.lateness_s) > held_s / 2
    latest = max(result.outcomes, key=lambda outcome: outcome.sent_s - (outcome.due_s or 0))
    assert latest.ttft_s is not None
    assert latest.ttft_s >= latest.sent_s - (latest.due_s or 0) > held_s / 2


def test_a_bound_on_concurrency_tells_the_wait_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "30", *SHORT, "--max-concurrency", "2")
        _, record, printed = bench(capsys, tmp_path, *arguments, "--num-warmups", "3")
    assert len(server.bodies) == 33
    assert record["results"]["completed"] == 30
    assert record["results"]["max_concurrent_requests"] == 2
    assert record["results"]["max_queue_ms"] > 0
    assert "wait in the client" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    every(
        2,
        [
            (("--request-rate", "0"), "--request-rate=0: it must be over 0"),
            (("--request-rate", "-3"), "--request-rate=-3: it must be over 0"),
            (("--request-rate", "nan"), "--request-rate=nan"),
            (("--request-rate", "fast"), "it must be a number"),
            (("--burstiness", "0"), "--burstiness=0: it must be over 0"),
            (("--ramp-up-strategy", "linear"), "a ramp needs all of"),
            (
                ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "5"),
                "--ramp-up-start-rps=0: it must be over 0",
            ),
            (("--self-timed",), "--self-timed needs a file with times"),
            (("--num-prompts", "0"), "at least 1 request"),
            (("--goodput", "itl:5"), "--goodput itl:5: it must be NAME:MILLISECONDS"),
            (("--goodput", "ttft"), "--goodput ttft: it must be NAME:MILLISECONDS"),
            (("--metric-percentiles", "50,200"), "--metric-percentiles=50,200"),
            (("--percentile-metrics", "speed"), "speed is unknown"),
            (("--header", "nonsense"), "--header (hidden): it must be KEY=VALUE"),
            (("--base-url", "localhost:80"), "it must be like http://127.0.0.1:8000"),
            (("--base-url", "http://localhost:99999"), "--base-url=http://localhost:99999"),
            (("--tokenizer", "/nowhere"), "it must be a folder with a tokenizer.json"),
            (("--extra-body", '{"prompt": "x"}'), "prompt is what the benchmark sets itself"),
            (("--dataset-name", "sharegpt"), "give --dataset-path"),
            (("--dataset-name", "cat"), "it must be one of"),
            (("--backend", "vllm-rerank"), "which random-rerank has alone"),
            (("--dataset-name", "random-rerank"), "which random-rerank has alone"),
            (("--random-batch-size", "2"), "a request of --backend openai has one prompt"),
            (("--backend", "vllm-pooling", "--temperature", "0"), "--temperature is of sampling"),
            (("--backend", "openai-embeddings", "--ignore-eos"), "--ignore-eos is of sampling"),
        ],
    ),
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--model", "any", "--port", "9", *arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed


def test_a_result_that_could_not_be_written_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "serve", "--model", "any", "--output-json", str(tmp_path / "file" / "result.json")]) == 2
    assert "is no folder that can be written to" in capsys.readouterr().err


@pytest.mark.parametrize("is_link", [False, True])
def test_a_result_goes_into_a_pipe_and_does_not_take_its_place(is_link: bool, tmp_path: Path) -> None:
    """Nor that of a device or of a link, as /dev/stdout is."""
    pipe = named = tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_link:
        named = tmp_path / "link"
        named.symlink_to(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    record.check_writable(ResultOptions(output_json=str(named)))
    record.save({"benchmark": "serve", "results": {}}, ResultOptions(output_json=str(named)))
    written = os.read(descriptor, 1000)
    os.close(descriptor)
    assert json.loads(written) == {"benchmark": "serve", "results": {}}
    assert pipe.is_fifo()
    assert named.is_symlink() == is_link
    with pytest.raises(OptionError, match="no regular file, beside which --report could write"):
        record.check_writable(ResultOptions(output_json=str(named), report="html"))


def test_a_server_that_wants_a_key_is_not_taken_for_one_that_is_down(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_here(ServeOptions(port=0, api_key=(Secret("a-key"),))) as server:
        where = ("--base-url", server.url, "--num-prompts", "1", *SHORT)
        status, _, printed = bench(capsys, tmp_path, *where, "--ready-check-timeout-sec", "600")
        assert status == 1
        assert "it answered 401); a key of its clients is read from OPENAI_API_KEY in the environment" in printed
        monkeypatch.setenv("OPENAI_API_KEY", "a-key")
        assert bench(capsys, tmp_path, *where, "--random-vocab-size", "100")[0] == 0


def test_a_report_is_one_page_that_needs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake.FakeServer(fake.stream) as server:
        arguments = ("--base-url", server.url, "--num-prompts", "6", *SHORT, "--label", "<run>", "--report", "html")
        status, record, printed = bench(capsys, tmp_path, *arguments)
    page = (tmp_path / "result.html").read_text()
    assert status == 0
    assert f"wrote {tmp_path / 'result.html'}" in printed
    assert "<svg" in page
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert f"<b>{number(record['results']['request_throughput'])}</b>" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)


def test_a_report_without_matplotlib_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with fake.FakeServer(fake.stream) as server:
        assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2", "--report", "html"]) == 2
        assert "plots need matplotlib" in capsys.readouterr().err
        assert not server.bodies
