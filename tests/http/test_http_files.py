"""OpenAI's files and batches by its official client: kept within bounds, by key, and answered as run-batch answers."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from http_server import Server, engine_of, serving
from null_with_tokenizer import PARROT
from patience import wait_until
from running_batch import running_batch
from thinned import every

from headrace.frontend.http.apis.files.store import (
    FIRST_RUN,
    MOST_RUNS,
    FileStore,
    TakenError,
    output_name,
)
from headrace.frontend.http.server.shared_database import SILENT_S

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
END = "STOPHERE"
TEMPLATE = "{{ messages[-1]['content'] }}"
STORE_BYTES = 60_000
"""What each of the two keys may keep."""
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def server():
    """Of a model that says its last message, up to the stop string, slowly."""
    arguments = (
        *("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096"),
        *("--api-key", "k", "--api-key", "other", "--file-store-bytes", str(2 * STORE_BYTES)),
    )
    with serving(*arguments, null_model={"step_delay_s": 0.002}) as server:
        yield server


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)


def client_of(server: Server, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def said(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    return line(custom_id, messages=[{"role": "user", "content": text + END}], stop=[END], **more)


def upload(client: openai.OpenAI, *lines: Any, **more: Any) -> Any:
    text = b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
    return client.files.create(file=("some/where/in.jsonl", io.BytesIO(text)), purpose="batch", **more)


def start(client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT, **more: Any) -> Any:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def end_of(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, 30, "the end of the batch")
    return client.batches.retrieve(batch.id)


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str | None, Any]:
    assert file_id is not None
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_file_is_kept_as_it_came_until_it_is_deleted(client):
    made = upload(client, b"x" * 5000, expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.bytes, made.filename, made.purpose, made.status) == (5000, "in.jsonl", "batch", "processed")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == b"x" * 5000
    second = upload(client, b"")
    assert [file.id for file in client.files.list(order="asc")] == [made.id, second.id]
    assert [file.id for file in client.files.list(order="desc", limit=1)] == [second.id, made.id], "in two pages"
    assert client.files.delete(made.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file "):
            ask(made.id)


def test_a_batch_answers_each_line_and_sets_errors_apart(client):
    batch = start(
        client, said("a", "hello"), b"  ", said("b", "ü" * 9000), b"{", said("c", "", n=2), metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, CHAT)
    batch = end_of(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers, errors = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert set(answers) == {"a", "c"}
    answer = openai.types.chat.ChatCompletion.model_validate(answers["a"]["response"]["body"])
    assert answer.choices[0].message.content == "hello"
    assert len(answers["c"]["response"]["body"]["choices"]) == 2
    assert errors["b"]["error"]["message"].startswith("line 3: This model's maximum context length")
    assert "line 4: the line is not valid JSON" in errors[None]["error"]["message"]
    assert batch in list(client.batches.list())
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((b"{", b"", said("a", "x") | {"method": "GET"}), [(1, None, "line 1: the line is no"), (3, "method", "POST")]),
        ((line("a", COMPLETIONS, prompt="x"),), [(1, "url", "the batch is for /v1/chat/completions")]),
        ((b" ", b""), [(None, None, "the file has no lines")]),
    ],
)
def test_a_file_without_any_request_is_a_batch_that_failed(client, lines, told):
    batch = end_of(client, start(client, *lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at >= batch.created_at
    found = openai.types.batch.Errors.model_validate(batch.errors.to_dict(), strict=True).data
    assert [(error.line, error.param) for error in found] == [(number, param) for number, param, _ in told]
    for error, (_, _, words) in zip(found, told, strict=True):
        assert words in str(error.message)


def test_results_are_forgotten_when_their_batch_says(client):
    after: Any = {"anchor": "created_at", "seconds": 3600}
    batch = end_of(client, start(client, said("a", "hello"), b"{", output_expires_after=after))
    for id in (batch.output_file_id, batch.error_file_id):
        file = client.files.retrieve(id)
        assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match=r"expires_after.seconds must be 3600 to 2592000"):
        upload(client, b"x", expires_after={"anchor": "created_at", "seconds": 60})


def test_a_batch_is_for_one_endpoint(client):
    lines = (line("a", COMPLETIONS, prompt="hi", max_tokens=3), said("b", "x"))
    batch = end_of(client, start(client, *lines, endpoint=COMPLETIONS))
    assert set(rows(client, batch.output_file_id)) == {"a"}
    assert "the batch is for /v1/completions" in rows(client, batch.error_file_id)["b"]["error"]["message"]


def test_a_batch_of_responses_is_answered_as_the_route_answers(client):
    """Stored ones are there by their ids, and may be followed; what has no place in a batch is refused by name."""

    def response(custom_id: str, **body: Any) -> dict[str, Any]:
        return line(custom_id, RESPONSES, input="hello" + END, stop=[END], max_output_tokens=20, **body)

    before = client.responses.create(model="null", input="x", max_output_tokens=16)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    batch = start(
        client,
        response("kept"),
        response("not kept", store=False, tools=[tool]),
        response("follows", previous_response_id=before.id),
        response("gone", previous_response_id="resp_gone"),
        response("streamed", stream=True),
        response("background", background=True),
        response("wrong", temperature=-1),
        line("other", CHAT, messages=[]),
        endpoint=RESPONSES,
    )
    batch = end_of(client, batch)
    assert batch.request_counts.to_dict() == {"total": 8, "completed": 3, "failed": 5}
    answers, errors = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    told = {
        id: openai.types.responses.Response.model_validate(row["response"]["body"], strict=True)
        for id, row in answers.items()
    }
    assert {id: each.status for id, each in told.items()} == dict.fromkeys(("kept", "not kept", "follows"), "completed")
    assert told["kept"].output_text == told["not kept"].output_text == "hello"
    assert told["follows"].previous_response_id == before.id
    assert client.responses.retrieve(told["kept"].id).output_text == "hello"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told["not kept"].id)
    words = {
        "gone": (404, "previous_response_id", "Response with id 'resp_gone' not found"),
        "streamed": (400, "stream", "a batch gives whole answers"),
        "background": (400, "background", "a batch gives whole answers"),
        "wrong": (400, "temperature", "temperature"),
    }
    for id, (status, param, said_of) in words.items():
        error = errors[id]["response"]["body"]["error"]
        assert (errors[id]["response"]["status_code"], error["param"]) == (status, param)
        assert said_of in error["message"]
    assert "the batch is for /v1/responses" in errors["other"]["error"]["message"]


def test_a_cancelled_batch_keeps_what_it_has_answered(client):
    batch = start(
        client, said("a", "hello"), line("long", messages=[{"role": "user", "content": "x"}], max_tokens=4000)
    )
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 20, "the first answer")
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = end_of(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    assert set(rows(client, batch.output_file_id)) == {"a"}
    with pytest.raises(openai.ConflictError, match="the batch has ended: it is cancelled"):
        client.batches.cancel(batch.id)


def test_keys_see_what_they_made_and_nothing_else(server, client):
    batch = end_of(client, start(client, said("a", "hello")))
    with client_of(server, "other") as other:
        assert list(other.files.list()) == list(other.batches.list()) == []
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(batch.output_file_id)
        for ask_of_batch in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask_of_batch(batch.id)
        with pytest.raises(openai.NotFoundError, match="no file "):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_the_store_takes_no_more_than_its_bound(client):
    kept = upload(client, b"x" * (STORE_BYTES - 10_000))
    with pytest.raises(openai.APIStatusError, match="and they are full") as error:
        upload(client, b"x" * 11_000)
    assert (error.value.status_code, error.value.code) == (413, "file_store_full")
    upload(client, b"x" * 9_000)
    client.files.delete(kept.id)
    upload(client, b"x" * 11_000)


def test_a_batch_that_fills_the_store_fails_and_keeps_what_was_written(client):
    body = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 300, "logprobs": True}
    batch = end_of(client, start(client, said("a", "hello"), *(line(f"r{index}", **body) for index in range(4))))
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "file_store_full"
    assert sum(file.bytes for file in client.files.list()) <= STORE_BYTES


FORM = "multipart/form-data; boundary=b"
GOOD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    every(
        2,
        [
            (b"{}", {"content-type": "application/json"}, 415, "must be multipart/form-data"),
            (b"x", {"content-type": "multipart/form-data"}, 415, "must be multipart/form-data"),
            (b"nothing", {"content-type": FORM}, 400, "the body is no multipart/form-data"),
            (GOOD + FILE, {"content-type": FORM}, 400, "ends within a part"),
            (GOOD + b"--b--\r\n", {"content-type": FORM}, 400, "file is required"),
            (FILE + b"--b--\r\n", {"content-type": FORM}, 400, "purpose is required"),
            (GOOD.replace(b"batch", b"vision") + FILE + b"--b--\r\n", {"content-type": FORM}, 400, "it must be batch"),
            (GOOD + FILE + FILE + b"--b--\r\n", {"content-type": FORM}, 400, "file must be one part"),
            (FILE * 40 + b"--b--\r\n", {"content-type": FORM}, 400, "file must be one part"),
            (GOOD * 40 + b"--b--\r\n", {"content-type": FORM}, 413, "more than 32 parts"),
            (GOOD.replace(b"batch", b"x" * 70_000) + b"--b--\r\n", {"content-type": FORM}, 413, "are too large"),
            (GOOD.replace(b'"purpose"', b'"more"') + GOOD + FILE + b"--b--\r\n", {"content-type": FORM}, 400, "'more'"),
        ],
    ),
)
def test_other_bodies_are_refused_and_leave_nothing(server, client, body, headers, status, words):
    answer = httpx.post(
        f"{server.url}/v1/files", content=body, headers={"authorization": "Bearer k", **headers}, timeout=30
    )
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert list(client.files.list()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint is '/v1/moderations'"),
        ({"completion_window": "1h"}, "completion_window must be 24h"),
        ({"input_file_id": "file-../../etc/passwd"}, "no file "),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
def test_batches_that_cannot_be_are_refused_by_name(client, changes, words):
    file = upload(client, said("a", "x"))
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | changes
    with pytest.raises(openai.APIStatusError) as error:
        client.batches.create(**asked)
    assert words in error.value.message


SLOW = line("long", messages=[{"role": "user", "content": "x"}], max_tokens=4000)


def test_a_batch_whose_server_ends_goes_on_in_the_next_and_answers_nothing_twice(tmp_path: Path):
    arguments = (
        *("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096"),
        *("--file-store", str(tmp_path / "files"), "--shutdown-timeout", "0"),
    )
    with serving(*arguments, null_model={"step_delay_s": 0.02}) as server:
        with client_of(server) as client:
            batch = start(client, said("a", "hello"), SLOW, line("bad", temperature=-1))
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 20, "the first answer")
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.failed == 1, 20, "the bad line's error")
        server.signal()
        assert server.wait_exit() == 0

    async def look() -> tuple[Any, bytes]:
        store = FileStore(str(tmp_path / "files"), 1 << 20)
        try:
            found, answers = await store.batch("", batch.id), store.results("", output_name(batch.id))
            assert answers is not None
            return found, store.path(answers.id).read_bytes()
        finally:
            store.close()

    found, written = asyncio.run(look())
    assert found.status == "in_progress"
    (first,) = map(json.loads, written.splitlines())
    with serving(*arguments) as server, client_of(server) as client:
        done = end_of(client, batch)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
        assert done.in_progress_at == found.in_progress_at
        answers = rows(client, done.output_file_id)
        assert set(answers) == {"a", "long"}
        assert answers["a"] == first
        assert set(rows(client, done.error_file_id)) == {"bad"}
        assert len(client.files.content(done.output_file_id or "").text.splitlines()) == 2


@pytest.mark.system
def test_a_batch_whose_server_was_killed_goes_on_in_the_next_once_it_is_silent(tmp_path: Path):
    folder = tmp_path / "files"
    arguments = (
        *("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096"),
        *("--file-store", str(folder)),
    )
    with serving(*arguments, null_model={"step_delay_s": 0.02}) as server:
        with client_of(server) as client:
            batch = start(client, said("a", "hello"), SLOW)
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 20, "the first answer")
        server.process.kill()
        server.wait_exit()
    with serving(*arguments) as server, client_of(server) as client:
        assert client.batches.retrieve(batch.id).status == "in_progress"
        with sqlite3.connect(folder / "index.sqlite") as index:
            (heard,) = index.execute("select heard from batches").fetchone()
            assert time.monotonic() - heard < SILENT_S, "who is silent is not dead"
            index.execute("update batches set heard = heard - ?", (SILENT_S + 1,))
        done = end_of(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 2)
        assert set(rows(client, done.output_file_id)) == {"a", "long"}


@pytest.mark.system
def test_a_batch_outlives_its_engine(tmp_path: Path):
    arguments = ("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096")
    with serving(
        *arguments, "--restart-engine", "1", "--max-migrations", "0", null_model={"step_delay_s": 0.005}
    ) as server:
        with client_of(server) as client:
            batch = start(client, said("a", "hello"), {**SLOW, "body": {**SLOW["body"], "max_tokens": 1000}})
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 20, "the first answer")
            engine_of(server).kill()
            done = end_of(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 2)


def test_a_batch_whose_record_cannot_be_read_hides_no_other(tmp_path: Path):
    """As one that another version has written."""

    async def see() -> None:
        store, batch = FileStore(str(tmp_path), 1 << 20), running_batch()
        other = msgspec.structs.replace(batch, id="batch_2")
        try:
            for each in (batch, other):
                await store.add_batch("k", each)
                await store.leave_batch("k", each)
            spoil = "update batches set object = ? where id = ?"
            await store.run(lambda: store._database.execute(spoil, (b'{"id": 1}', batch.id)))
            assert [each.batch.id for each in await store.take_over()] == ["batch_2"]
        finally:
            store.close()

    asyncio.run(see())


def test_a_batch_is_taken_over_once_and_not_for_ever(tmp_path: Path):
    """It may be what ends the processes that run it. One that was thought dead and is not writes nothing more."""
    batch = running_batch()

    async def see() -> None:
        first, second = FileStore(str(tmp_path), 1 << 20), FileStore(str(tmp_path), 1 << 20)
        try:
            await first.add_batch("k", batch)
            assert await second.take_over() == [], "its process lives"
            for run in range(FIRST_RUN + 1, MOST_RUNS + 1):
                await first.leave_batch("k", batch)
                taken = await asyncio.gather(first.take_over(), second.take_over())
                ((tenant, same, number),) = [each for found in taken for each in found]
                assert (tenant, same.id, number) == ("k", batch.id, run)
                second.check_run("k", batch.id, run)
                with pytest.raises(TakenError):
                    first.check_run("k", batch.id, run - 1)
            await first.leave_batch("k", batch)
            assert await second.take_over() == []
            failed = await second.batch("k", batch.id)
            assert failed is not None
            assert failed.status == "failed"
            assert f"has ended {MOST_RUNS} times" in str(failed.errors)
            other = msgspec.structs.replace(batch, id="batch_2")
            await first.add_batch("k", other)
            await first.cancel_batch("k", "batch_2")
            await first.leave_batch("k", other)
            assert await second.take_over() == []
            cancelled = await second.batch("k", "batch_2")
            assert cancelled is not None
            assert cancelled.status == "cancelled"
        finally:
            first.close()
            second.close()

    asyncio.run(see())


@pytest.mark.system
def test_processes_of_a_server_share_files_and_batches(tmp_path: Path):
    """Each connection comes to one of two processes; one of them runs the batch, and any of them ends it."""
    arguments = ("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096")
    with serving(
        *arguments, "--api-server-count", "2", "--file-store", str(tmp_path), null_model={"step_delay_s": 0.02}
    ) as server:
        with client_of(server) as client:
            done = end_of(client, start(client, said("a", "hello")))
            long = start(client, line("long", messages=[{"role": "user", "content": "x"}], max_tokens=4000))
        for _ in range(16):
            with client_of(server) as client:
                assert set(rows(client, done.output_file_id)) == {"a"}
                assert client.batches.retrieve(long.id).status in ("validating", "in_progress")
        with client_of(server) as client:
            assert client.batches.cancel(long.id).status == "cancelling"
        with client_of(server) as client:
            assert end_of(client, long).status == "cancelled"
