"""The stores that a server's HTTP processes share: they open them at the same time, and change the same batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.frontend.http.files.store import BatchObject, BatchStatus, FileStore, RequestCounts
from headrace.frontend.http.responses_api.store import ResponseStore

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
    batch = BatchObject(
        id="batch_1",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        completion_window="24h",
        status="in_progress",
        created_at=1,
        expires_at=2**31,
        request_counts=RequestCounts(),
    )

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
