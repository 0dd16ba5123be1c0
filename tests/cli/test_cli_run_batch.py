"""`headrace run-batch`: every line gets one result, bad ones too, and a run that was cut short can be resumed."""

from __future__ import annotations

import asyncio
import codecs
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import zmq
from fake_core import Faults, ZmqCore, zmq_core
from fleet_parts import Session
from http_server import null_engine_arguments
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from patience import wait_until, within
from source_tree import PYTHONPATH

from headrace import LLM, SamplingParams
from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.frontend.batch_file.file import Results
from headrace.frontend.batch_file.run import BatchRun
from headrace.frontend.cli.main import main
from headrace.frontend.fleet.pool import EnginePool
from headrace.ipc.failure import Failure
from headrace.ipc.messages import AddRequest, Draining, EngineFailed

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture
def core(runtime_directory: Path) -> Iterator[ZmqCore]:
    with zmq_core() as running:
        yield running


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(each) for each in text.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    rows = {row["custom_id"]: row for row in results(path)}
    assert len(rows) == len(results(path))
    return rows


def run_batch(core: ZmqCore, source: Path, out: Path, *more: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(out), "--engine", core.address, *more])


def num_asked(core: ZmqCore) -> int:
    return sum(isinstance(each, AddRequest) for each in core.core.received)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_a_file_in_another_encoding_is_read(core: ZmqCore, tmp_path: Path, encoding: str) -> None:
    """As PowerShell writes files."""
    lines = [line("one", prompt="ein Schlüssel, 鍵 \u0a0a", max_tokens=2), line("two", prompt="two", max_tokens=2)]
    source = tmp_path / "in.jsonl"
    source.write_bytes("\r\n".join(json.dumps(each, ensure_ascii=False) for each in lines).encode(encoding))
    assert run_batch(core, source, tmp_path / "out.jsonl") == 0
    assert {name: row["response"]["status_code"] for name, row in by_id(tmp_path / "out.jsonl").items()} == {
        "one": 200,
        "two": 200,
    }


def test_a_file_that_is_not_in_the_encoding_it_begins_with_is_named(core: ZmqCore, tmp_path: Path, capsys) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(codecs.BOM_UTF16_LE + b"{\x00\x00\xd8\n")
    assert run_batch(core, source, tmp_path / "out.jsonl") == 2
    said = capsys.readouterr().err
    assert "UTF-16" in said
    assert "iconv" in said


def test_answers_are_the_library_s_own_in_the_api_s_shape(
    core: ZmqCore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    source = write(
        tmp_path / "in.jsonl",
        codecs.BOM_UTF8 + json.dumps(line("chat", CHAT, messages=messages, max_completion_tokens=6, seed=3)).encode(),
        b"  ",
        line("text", prompt="the quick", max_tokens=5, n=2, seed=1),
        line("ids", prompt=[[5, 6, 7], [8, 9]], max_tokens=4),
    )
    assert run_batch(core, source, tmp_path / "out.jsonl") == 0
    rows = by_id(tmp_path / "out.jsonl")
    with LLM.connect(core.address) as llm:
        (said,) = llm.chat(messages, SamplingParams(max_tokens=6, seed=3), use_tqdm=False)
        (text,) = llm.generate("the quick", SamplingParams(max_tokens=5, n=2, seed=1), use_tqdm=False)
    chat = openai.types.chat.ChatCompletion.model_validate(rows["chat"]["response"]["body"])
    assert chat.choices[0].message.content == said.outputs[0].text
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(said.prompt_token_ids), 6)
    completion = openai.types.Completion.model_validate(rows["text"]["response"]["body"])
    assert [choice.text for choice in completion.choices] == [each.text for each in text.outputs]
    assert [choice["index"] for choice in rows["ids"]["response"]["body"]["choices"]] == [0, 1]
    for row in rows.values():
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        assert row["id"].startswith("batch_req_")
        # vLLM's BatchResponseData, which clients read the lines with
        assert set(row["response"]) == {"status_code", "request_id", "body"}
        assert isinstance(row["response"]["request_id"], str)
        assert row["response"]["request_id"]
    assert len({row["id"] for row in rows.values()}) == 3
    assert "3 answered, 0 failed; 24 output tokens" in capsys.readouterr().err


def test_responses_are_answered_and_nothing_of_them_is_kept(core: ZmqCore, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("said", RESPONSES, input="hi", max_output_tokens=6),
        line("keeps", RESPONSES, input="hi", store=True),
        line("follows", RESPONSES, input="hi", previous_response_id="resp_1"),
        line("calls", RESPONSES, input="hi", tools=[{"type": "mcp", "server_label": "a"}]),
        line("streams", RESPONSES, input="hi", stream=True),
    )
    assert run_batch(core, source, tmp_path / "out.jsonl") == 0
    rows = by_id(tmp_path / "out.jsonl")
    response = openai.types.responses.Response.model_validate(rows["said"]["response"]["body"], strict=True)
    assert response.usage is not None
    assert (response.usage.output_tokens, response.to_dict()["store"]) == (6, False)
    assert rows["keeps"]["error"]["message"].startswith("line 2: store: this server keeps no responses")
    assert rows["follows"]["response"]["status_code"] == 404
    assert "--tool-server" in rows["calls"]["error"]["message"]
    assert rows["streams"]["error"]["param"] == "stream"


BAD_LINES: list[tuple[dict[str, Any] | bytes, str | None, str]] = [
    (b"{", None, "the line is not valid JSON"),
    (b"\xff\xfe", None, "the line is not valid JSON"),
    (b"[1]", None, "the line must be a JSON object"),
    ({"method": "POST", "url": CHAT, "body": {}}, "custom_id", "custom_id is required"),
    ({**line("x"), "custom_id": 7}, "custom_id", "custom_id: expected str, got int"),
    ({**line("x"), "custom_id": ""}, "custom_id", "custom_id is empty"),
    ({**line("x"), "extra": 1}, "extra", "unknown field 'extra'"),
    ({**line("x"), "body": [1]}, "body", "body: expected object, got array"),
    ({**line("x"), "method": "GET"}, "method", "method is 'GET'; it must be POST"),
    (line("x", "/v1/moderations"), "url", "url is '/v1/moderations'; it must be /v1/chat/completions, /v1/compl"),
    (line("x", prompt="a", temprature=1), "temprature", "unknown field 'temprature'; did you mean temperature?"),
    (line("x", prompt="a", temperature="hot"), "temperature", "temperature: expected float"),
    (line("x", prompt="a", top_p=7), "top_p", "top_p = 7.0: must be over 0 and at most 1"),
    (line("x", prompt="a", logit_bias={"a": 1}), "logit_bias", "logit_bias has keys that are no token ids: 'a'"),
    (line("x", prompt="a", response_format={"type": "x"}), "response_format", "response_format must be an object"),
    (line("x", prompt="a", stream=True), "stream", "stream: a batch gives whole answers"),
    (line("x", prompt="a", model="other"), "model", "the model 'other' does not exist; served: fake"),
    (line("x", prompt="a" * 300), "prompt", "maximum context length is 256 tokens"),
    (line("x", CHAT, messages=[]), "messages", "messages is empty"),
    (line("good", prompt="again"), "custom_id", "custom_id 'good' is already used by an earlier line"),
]


def test_a_bad_line_gets_an_error_that_names_line_and_field_and_stops_no_other(core: ZmqCore, tmp_path: Path) -> None:
    good, last = line("good", prompt="hello", max_tokens=3), line("last", prompt="hello", max_tokens=3)
    bad_lines = [
        ({**bad, "custom_id": f"x{index}"} if isinstance(bad, dict) and bad.get("custom_id") == "x" else bad, *rest)
        for index, (bad, *rest) in enumerate(BAD_LINES)
    ]
    source = write(tmp_path / "in.jsonl", good, *(bad for bad, *_ in bad_lines), last)
    assert run_batch(core, source, tmp_path / "out.jsonl", "--max-concurrency", "1") == 0
    rows = results(tmp_path / "out.jsonl")
    assert len(rows) == len(BAD_LINES) + 2
    assert [row["custom_id"] for row in rows if row["error"] is None] == ["good", "last"]
    for number, (row, (bad, param, words)) in enumerate(zip(rows[1:-1], bad_lines, strict=True), 2):
        assert row["error"]["message"].startswith(f"line {number}: ")
        assert words in row["error"]["message"]
        assert (row["error"]["param"], row["error"]["line"]) == (param, number)
        named = bad.get("custom_id") if isinstance(bad, dict) else None
        assert row["custom_id"] == (named if isinstance(named, str) else None)
        if row["response"] is not None:
            assert row["response"]["status_code"] in (400, 404)
            assert row["response"]["body"]["error"]["param"] == param


def test_a_request_that_fails_in_the_engine_is_an_error_of_its_own(runtime_directory: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("fails", prompt=[5, 6], max_tokens=4),
        line("works", prompt=[7, 6], max_tokens=4),
    )
    with zmq_core(faults=Faults(failing_prompts=(5,))) as core:
        assert run_batch(core, source, tmp_path / "out.jsonl") == 0
    rows = by_id(tmp_path / "out.jsonl")
    assert rows["works"]["error"] is None
    assert rows["fails"]["response"]["status_code"] == 500
    assert rows["fails"]["error"]["message"] == "line 1: the model gave NaN"


@pytest.mark.parametrize("how", [(), ("--resume",), ("--overwrite",)])
def test_a_folder_is_no_output_file(how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in.jsonl", b"{}")
    assert main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path), *how]) == 2
    assert f"cannot write the output file {tmp_path}: it is a folder" in capsys.readouterr().err


def test_resume_runs_what_has_no_result_yet(core: ZmqCore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{index}", prompt="hello", max_tokens=3) for index in range(4)]
    write(source, lines[0], b"nonsense", lines[1])
    assert run_batch(core, source, out) == 0
    first = out.read_bytes()
    assert run_batch(core, source, out) == 2  # not without being told so
    assert "has results already: go on with --resume" in capsys.readouterr().err
    out.write_bytes(first + b'{"id": "batch_req_half of a li')
    write(source, lines[0], b"nonsense", *lines[1:])
    before = num_asked(core)
    told = run_batch(core, source, out, "--resume", "--fail-on-error")
    assert told == 1, "the error of the run before is still in the output"
    assert out.read_bytes().startswith(first)
    assert num_asked(core) == before + 2
    assert sorted(row["custom_id"] or "" for row in results(out)) == ["", "r0", "r1", "r2", "r3"]
    assert "2 answered, 0 failed, 3 had a result already (1 of them an error;" in capsys.readouterr().err
    answered = [row for row in out.read_bytes().splitlines(keepends=True) if json.loads(row)["error"] is None]
    out.write_bytes(b"".join(answered))
    write(source, *lines)
    assert run_batch(core, source, out, "--resume") == 0


def test_results_stand_in_the_inputs_order_unless_asked_for_as_completed(
    core: ZmqCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"r{index}" for index in range(6)]
    write(
        source,
        line("r0", prompt="hello", max_tokens=240),
        *(line(each, prompt="x", max_tokens=1) for each in names[1:]),
    )
    assert run_batch(core, source, out, "--max-concurrency", "6") == 0
    assert [row["custom_id"] for row in results(out)] == names
    step, wanted = core.core.step, num_asked(core) + len(names)
    # The first might else have ended before the others were asked.
    monkeypatch.setattr(core.core, "step", lambda: step() if num_asked(core) >= wanted else [])
    assert run_batch(core, source, out, "--overwrite", "--as-completed", "--max-concurrency", "6") == 0
    *others, last = (row["custom_id"] for row in results(out))
    assert (sorted(others), last) == (names[1:], "r0"), "the longest ends last, the others with one step"
    assert run_batch(core, source, out, "--overwrite", "--resume") == 2


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_requests_run_at_once_than_allowed(core: ZmqCore, tmp_path: Path, bound: int) -> None:
    most = 0
    step = core.core.step

    def watched() -> Any:
        nonlocal most
        most = max(most, len(core.core.running))
        return step()

    core.core.step = watched  # type: ignore[method-assign]
    source = write(tmp_path / "in.jsonl", *(line(f"r{index}", prompt="hello", max_tokens=3) for index in range(12)))
    assert run_batch(core, source, tmp_path / "out.jsonl", "--max-concurrency", str(bound)) == 0
    assert len(by_id(tmp_path / "out.jsonl")) == 12
    assert 1 <= most <= bound


def open_contexts() -> set[int]:
    # By type: asking some of torch's objects for their class warns of deprecation.
    return {id(each) for each in gc.get_objects() if issubclass(type(each), zmq.Context) and not each.closed}


@pytest.mark.parametrize(
    ("news", "words"),
    [
        (EngineFailed(failure=Failure(message="the engine-core ran out of memory")), "ran out of memory"),
        (Draining(deadline_s=9.0), "the engine is shutting down and takes no new requests"),
    ],
)
def test_an_engine_that_ends_ends_the_run_which_keeps_what_there_is(
    core: ZmqCore, tmp_path: Path, capsys: pytest.CaptureFixture[str], news: Any, words: str
) -> None:
    step = core.core.step

    def ends() -> Any:
        told = step()
        last = core.core.steps == 5
        return [*told, *((client, news) for client, _ in told if last)]

    core.core.step = ends  # type: ignore[method-assign]
    source = write(tmp_path / "in.jsonl", *(line(f"r{index}", prompt="hello", max_tokens=4) for index in range(9)))
    before = open_contexts()
    assert run_batch(core, source, tmp_path / "out.jsonl", "--max-concurrency", "1") == 1
    assert words in capsys.readouterr().err
    assert {"r0"} <= {row["custom_id"] for row in results(tmp_path / "out.jsonl")} <= {"r0", "r1"}
    assert all(row["error"] is None for row in results(tmp_path / "out.jsonl"))
    assert open_contexts() <= before  # one left open would hang whoever collects it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-i", "none.jsonl", "-o", "out"], "cannot read the input file none.jsonl: there is no such file"),
        (["-i", "in.jsonl", "-o", "in.jsonl", "--resume"], "the output file is the input file"),
        (["-i", "in.jsonl", "-o", "no/such/folder"], "cannot write the output file no/such/folder: no such file"),
        (["-i", "in.jsonl", "-o", "notes", "--resume"], "notes, line 1, is no batch result"),
        (["-i", "in.jsonl", "-o", "out", "--max-concurrency", "0"], "--max-concurrency=0: it must be at least 1"),
        (["-i", "in.jsonl", "-o", "out", "--engine", "ipc:///x", "--block-size", "8"], "leave out --block-size"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_touches_no_file(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", line("a", prompt="x"))
    (tmp_path / "notes").write_text("my notes\n")
    assert main(["run-batch", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "my notes\n"
    assert len((tmp_path / "in.jsonl").read_text().splitlines()) == 1


def start_own(tmp_path: Path, *more: str, **model: Any) -> subprocess.Popen[str]:
    engine = ["--model", *null_engine_arguments(**model), *more]
    command = [sys.executable, "-m", "headrace", "run-batch", *engine]
    return subprocess.Popen(
        [*command, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def test_it_starts_an_engine_of_its_own_and_leaves_nothing_behind(runtime_directory: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *(line(f"r{index}", prompt="hello", max_tokens=8) for index in range(20)))
    process = start_own(tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert len(by_id(tmp_path / "out.jsonl")) == 20


@pytest.mark.system
def test_a_run_outlives_one_of_its_engines_which_all_have_a_share(runtime_directory: Path, tmp_path: Path) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    lines = [line(f"r{each}", prompt=[5, each], seed=each, **asked) for each in range(12)]
    write(tmp_path / "in.jsonl", line("first", prompt=[7], max_tokens=1), *lines)
    process, out = start_own(tmp_path, "-dp", "2", "--as-completed", step_delay_s=0.02), tmp_path / "out.jsonl"
    try:
        wait_until(lambda: out.exists() and out.stat().st_size > 0, 60.0, "a result")
        children = psutil.Process(process.pid).children()
        daemons = [each for each in children if "headrace.core.process.daemon" in each.cmdline()]
        assert len(daemons) == 2
        daemons[0].kill()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert f"13 answered, 0 failed; {12 * 60 + 1} output tokens" in errors
    assert "an engine has ended: engine-core" in errors
    rows = by_id(out)
    null: dict[str, Any] = {"distributed_executor_backend": BACKEND, "hf_overrides": {"vocab_size": VOCAB_SIZE}}
    with LLM("null", in_process=True, **null) as llm:
        params = [SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1, seed=each) for each in range(12)]
        alone = llm.generate([[5, each] for each in range(12)], params, use_tqdm=False)
    told = [rows[f"r{each}"]["response"]["body"]["choices"][0]["text"] for each in range(12)]
    assert told == [each.outputs[0].text for each in alone]


def test_a_line_that_kills_engines_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Else a batch that goes on later would kill the next two."""
    source = write(
        tmp_path / "in.jsonl",
        line("kills", prompt=[5] * 100, max_tokens=4),
        line("works", prompt=[7, 6], max_tokens=40, ignore_eos=True),
    )
    null: dict[str, Any] = {"distributed_executor_backend": BACKEND, "hf_overrides": {"step_delay_s": 0.05}}
    thread = EngineThread(parse_options(model="null", max_num_batched_tokens=16, max_num_seqs=4, **null))
    sessions = [Session(thread) for _ in range(3)]
    engines = EnginePool(sessions)

    async def kill() -> None:
        while True:
            for member in [*engines.router.members.values()]:
                if any(each.num_prompt_tokens == 100 and not each.work.num_tokens for each in member.requests):
                    sessions[member.facts.rank].kill()
            await asyncio.sleep(0.01)

    async def main() -> int:
        killer = asyncio.create_task(kill())
        try:
            return await BatchRun(source, results_file, None, fails_on_error=True).run(engines)
        finally:
            killer.cancel()

    results_file = Results(tmp_path / "out.jsonl", resume=False, overwrite=False)
    try:
        assert asyncio.run(main()) == 1
    finally:
        results_file.close()
        thread.stop()
    rows = by_id(tmp_path / "out.jsonl")
    assert rows["works"]["error"] is None
    assert "two engines died while running this request" in rows["kills"]["error"]["message"]


@pytest.mark.parametrize("while_it", ["loads", "runs"])
def test_ctrl_c_ends_it_and_leaves_whole_lines(runtime_directory: Path, tmp_path: Path, while_it: str) -> None:
    write(
        tmp_path / "in.jsonl",
        line("quick", prompt="hello", max_tokens=1),
        line("slow", prompt="hello", max_tokens=10_000, ignore_eos=True),
    )
    delays = {"load_delay_s": 60.0} if while_it == "loads" else {"step_delay_s": 0.05}
    process = start_own(tmp_path, **delays)
    out = tmp_path / "out.jsonl"
    try:
        wait_until(lambda: out.exists() and (while_it == "loads" or out.stat().st_size > 0), 30.0, "a result")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=within(30))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    if while_it == "runs":
        assert [row["custom_id"] for row in results(out)] == ["quick"]


def test_the_status_tells_of_bad_lines_where_asked(core: ZmqCore, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("good", prompt="hello", max_tokens=2), b"nonsense")
    assert run_batch(core, source, tmp_path / "out.jsonl") == 0
    assert run_batch(core, source, tmp_path / "again.jsonl", "--fail-on-error") == 1


def test_resume_runs_a_request_again_whose_body_has_changed(core: ZmqCore, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, line("same", prompt="hello", max_tokens=2), line("changed", prompt="hello", max_tokens=2))
    assert run_batch(core, source, out) == 0
    first = out.read_bytes()
    # A result of another program tells nothing of its request.
    foreign = {"id": "batch_req_1", "custom_id": "foreign", "response": None, "error": None}
    out.write_bytes(first + json.dumps(foreign).encode() + b"\n")
    lines = [line("same", prompt="hello", max_tokens=2), line("changed", prompt="hello", max_tokens=3)]
    write(source, *lines, line("foreign", prompt="a"), line("changed", prompt="twice"))
    before = num_asked(core)
    assert run_batch(core, source, out, "--resume") == 0
    assert num_asked(core) == before + 1
    (*_, last) = results(out)
    assert (last["custom_id"], last["response"]["body"]["usage"]["completion_tokens"]) == ("changed", 3)


def test_results_go_to_a_pipe(core: ZmqCore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", line("a", prompt="hello", max_tokens=2))
    command = [sys.executable, "-m", "headrace", "run-batch", "-i", str(source), "--engine", core.address]
    for more in ("-o", "/dev/stdout"), ("-o", "/dev/fd/1"):
        done = subprocess.run([*command, *more], stdout=subprocess.PIPE, timeout=60, check=True)
        assert json.loads(done.stdout)["custom_id"] == "a"
    os.mkfifo(tmp_path / "pipe")
    assert run_batch(core, source, tmp_path / "pipe", "--resume") == 2
    assert "is no regular file, so the results in it cannot be read" in capsys.readouterr().err


def test_options_of_a_servers_chats_apply_to_a_batch(core: ZmqCore, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    source = write(tmp_path / "in.jsonl", line("chat", CHAT, messages=messages, max_tokens=2))

    def prompt_tokens(*more: str) -> int:
        out = tmp_path / f"out{len(more)}.jsonl"
        assert run_batch(core, source, out, *more) == 0
        tokens: int = by_id(out)["chat"]["response"]["body"]["usage"]["prompt_tokens"]
        return tokens

    template = "{{ said * 30 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    said = ("--default-chat-template-kwargs", '{"said": "x"}', "--tool-call-parser", "hermes")
    assert prompt_tokens("--chat-template", template, *said) > prompt_tokens() > 0
    assert run_batch(core, source, tmp_path / "bad.jsonl", "--tool-call-parser", "nonsense") == 2
