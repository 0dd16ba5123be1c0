"""The stores that a server's HTTP processes share: they open them at the same time, change the same batch, and go on
while a store cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from http_server import Server, metric, serving
from null_with_tokenizer import PARROT
from patience import wait_until
from running_batch import running_batch

from headrace.frontend.http.apis.files import routes as file_handlers
from headrace.frontend.http.apis.files.store import BatchObject, BatchStatus, FileStore
from headrace.frontend.http.apis.responses import routes as response_handlers
from headrace.frontend.http.apis.responses.store import ResponseStore
from headrace.frontend.http.server.errors import ApiError

STORES: list[Callable[[Path], FileStore | ResponseStore]] = [
    lambda folder: FileStore(str(folder / "files"), 1 << 20),
    lambda folder: ResponseStore(str(folder / "responses.sqlite"), 1 << 20),
]
NUM_PROCESSES, ROUNDS = 8, 60


@pytest.mark.parametrize("make_store", STORES, ids=["files", "responses"])
def test_processes_open_a_new_store_at_the_same_time(make_store, tmp_path: Path):
    """SQLite's timeout does not cover the change to a write-ahead log: it failed one time in twenty."""
    together, failures = threading.Barrier(NUM_PROCESSES), []

    def open_all() -> None:
        for number in range(ROUNDS):
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            together.wait(60)
            try:
                make_store(folder).close()
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=open_all) for _ in range(NUM_PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("runner_is_first", "status", "kept_status"),
    [(True, "in_progress", "cancelling"), (False, "completed", "completed")],
    ids=["runner_reads_first", "canceller_reads_first"],
)
def test_a_batch_is_cancelled_while_its_process_updates_it(
    runner_is_first: bool, status: BatchStatus, kept_status: BatchStatus, tmp_path: Path, monkeypatch
):
    """Whichever reads the batch first, neither change undoes the other."""
    batch = running_batch()

    async def race() -> None:
        runner, canceller = FileStore(str(tmp_path), 1 << 20), FileStore(str(tmp_path), 1 << 20)
        has_read = threading.Event()

        async def put() -> object:
            return await runner.put_batch("k", msgspec.structs.replace(batch, status=status))

        async def cancel() -> object:
            return await canceller.cancel_batch("k", "batch_1")

        first, store, second = (put, runner, cancel) if runner_is_first else (cancel, canceller, put)
        find = store._find_batch

        def find_and_dawdle(tenant: str, id: str) -> BatchObject | None:
            found = find(tenant, id)
            has_read.set()
            threading.Event().wait(0.2)  # the other one would write now, if it could
            return found

        try:
            await runner.add_batch("k", batch)
            monkeypatch.setattr(store, "_find_batch", find_and_dawdle)
            begun = asyncio.create_task(first())
            await asyncio.to_thread(has_read.wait)
            await asyncio.gather(begun, second())
            monkeypatch.setattr(store, "_find_batch", find)
            kept = await runner.batch("k", "batch_1")
            assert kept is not None
            assert kept.status == kept_status
        finally:
            runner.close()
            canceller.close()

    asyncio.run(race())


RESPONSES, INDEX = "responses.sqlite", "files/index.sqlite"
SERVED = ("--distributed-executor-backend", PARROT, "--chat-template", "{{ messages[-1]['content'] }}")
CANNOT = "the server's {} store cannot be used now: no such table"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[Server, openai.OpenAI]]:
    stores = ("--response-store", str(folder / RESPONSES), "--file-store", str(folder / "files"))
    with (
        serving(*SERVED, *stores, "--max-model-len", "4096", null_model={"step_delay_s": 0.01}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield server, client


@contextlib.contextmanager
def broken(database: Path, table: str) -> Iterator[None]:
    """The statements of a server fail, as they do on a full disk."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=30)) as other:
        other.execute(f"alter table {table} rename to away")
        try:
            yield
        finally:
            other.execute(f"alter table away rename to {table}")


@contextlib.contextmanager
def read_only(database: Path, table: str) -> Iterator[None]:
    """A server's statements that write to the table fail."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=30)) as other:
        changes = ("insert", "update", "delete")
        for change in changes:
            other.execute(
                f"create trigger no_{change} before {change} on {table} begin select raise(fail, 'no change'); end"
            )
        try:
            yield
        finally:
            for change in changes:
                other.execute(f"drop trigger no_{change}")


@pytest.mark.system
def test_an_answer_that_cannot_be_stored_is_given_and_says_so(tmp_path: Path):
    body: dict[str, Any] = {"model": "null", "input": "hello", "max_output_tokens": 5}
    with served(tmp_path) as (server, client):
        kept = client.responses.create(**body)
        slow = client.responses.create(**body | {"max_output_tokens": 100}, background=True)
        with broken(tmp_path / RESPONSES, "responses"):
            lost = client.responses.create(**body)
            with client.responses.create(**body, stream=True) as stream:
                *_, last = stream
            for refused in (
                lambda: client.responses.create(**body, background=True),
                lambda: client.responses.create(**body, previous_response_id=kept.id),
                lambda: client.responses.retrieve(kept.id),
                lambda: client.responses.delete(kept.id),
            ):
                with pytest.raises(openai.InternalServerError, match=CANNOT.format("response")) as raised:
                    refused()
                assert (raised.value.status_code, raised.value.code) == (503, "store_unavailable")
            with server.client() as plain:  # what is in progress ends meanwhile, and is stored later
                wait_until(lambda: metric(plain, "headrace:num_requests_running") == 0, 20, "the slow response's end")
        assert (lost.output_text, lost.store, kept.store) == (kept.output_text, False, True)
        assert (last.type, last.response.store) == ("response.incomplete", False)
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
        wait_until(lambda: client.responses.retrieve(slow.id).status == "incomplete", 20, "the slow response")
        assert len(client.responses.retrieve(slow.id).output_text) > len(kept.output_text)
    assert server.log.count("the response store at") >= 6
    assert "Traceback" not in server.log


@pytest.mark.system
def test_a_batch_goes_on_when_its_store_can_be_used_again(tmp_path: Path):
    """Of two hundred lines, most are answered while results cannot be written; each is there once."""
    content = [{"role": "user", "content": "hello"}]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": content, "max_tokens": 2 if number % 2 else -1},
        }
        for number in range(200)
    ]
    last: dict[str, Any] = lines[-1] | {"custom_id": "last", "body": {"messages": content, "max_tokens": 400}}
    text = "".join(json.dumps(line) + "\n" for line in [*lines, last])
    with served(tmp_path) as (server, client):
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        with broken(tmp_path / INDEX, "batches"):  # fails before results are written
            server.wait_log("the file store at .*: no such table")
            with pytest.raises(openai.InternalServerError, match=CANNOT.format("file")):
                client.batches.list()
        with read_only(tmp_path / INDEX, "files"):  # fails after they are written
            server.wait_log("the file store at .*: no change")
            assert client.files.list().data
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 30, "the end of the batch")
        done = client.batches.retrieve(batch.id)
        for file_id, wanted in (
            (done.output_file_id, sorted([*map(str, range(1, 200, 2)), "last"])),
            (done.error_file_id, sorted(map(str, range(0, 200, 2)))),
        ):
            rows = map(json.loads, client.files.content(file_id or "").text.splitlines())
            assert sorted(row["custom_id"] for row in rows) == wanted
    assert "Traceback" not in server.log


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path):
    with served(tmp_path) as (server, client):
        (tmp_path / "files").rename(tmp_path / "away")
        with pytest.raises(openai.InternalServerError, match="file store cannot be used now: No such file") as raised:
            client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert raised.value.status_code == 503
        (tmp_path / "away").rename(tmp_path / "files")
        client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert [file.filename for file in client.files.list()] == ["in.jsonl"]
    assert "Traceback" not in server.log


@pytest.mark.parametrize(("handlers", "name"), [(file_handlers, "file_id"), (response_handlers, "response_id")])
def test_what_another_process_has_just_deleted_is_not_found(handlers, name: str):
    async def found(tenant: str, id: str) -> Any:
        return SimpleNamespace(id=id)

    async def deleted_by_another(tenant: str, id: str) -> bool:
        return False

    store = SimpleNamespace(get=found, file=found, delete=deleted_by_another)
    state = SimpleNamespace(of=lambda kind: SimpleNamespace(store=store))
    exchange = SimpleNamespace(scope={"path_params": {name: "it"}}, tenant="k")
    with pytest.raises(ApiError) as raised:
        asyncio.run(handlers.delete(state, exchange))
    assert (raised.value.status, raised.value.body.param) == (404, name)
