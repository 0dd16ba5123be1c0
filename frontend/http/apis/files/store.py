"""The folder that holds files, and its index of files and batches (SQLite), which several processes may share.

The disk is accessed in a separate thread, since it may be slow. A method that runs "in the store's thread" is
called through `run`.
"""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.batch_file.file import BatchError
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.shared_database import NEVER_S, SharedDatabase, heartbeat_s, is_silent
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.process.private_files import make_existing_private, private_opener, warn_of_open_folder
from headrace.ipc.struct_types import threadsafe

logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_BATCHES, MOST_FILES = 4096, 65536
"""Most batches and files in the index, divided among tenants as the bytes are; of batches that have ended, the oldest
are removed first."""
MOST_RUNS = 4
"""How often a batch is run if its process or engine ends each time, as the batch itself may be the cause."""
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 24 * 3600
"""Bounds of the time in seconds after which a file expires; the same as OpenAI's."""
RESULTS = "batch_output"
"""The purpose of files that batches write."""
_TABLES = """
create table if not exists files (tenant text, id text, made real, expires real, size integer, object blob,
    primary key (tenant, id));
create table if not exists batches (tenant text, id text, made real, heard real, runs integer, object blob,
    primary key (tenant, id));
"""


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class ExpiresAfter(msgspec.Struct, kw_only=True):
    anchor: Annotated[Literal["created_at"], Meta(description="When the file was made")]
    seconds: Annotated[int, Meta(ge=LEAST_EXPIRY_S, le=MOST_EXPIRY_S)]


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FIRST_RUN = 1
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class FullError(HeadraceError):
    """The store has no room for the data."""


class TakenError(HeadraceError):
    """Another process has taken over the batch, since this one sent no heartbeat for too long."""


class TakenOver(NamedTuple):
    """A batch that this process runs from now on."""

    tenant: str
    batch: BatchObject
    run: int
    """The number of this run of the batch, from 1."""


class FileStore:
    def __init__(self, folder: str | None, most_bytes: int, num_tenants: int = 1) -> None:
        """folder: None for a temporary one, or for none if most_bytes is 0. num_tenants: among how many it is
        divided, one for each API key. Raises OptionError if it cannot be used."""
        self.most_bytes = most_bytes
        self._share_bytes, self._num_tenants = most_bytes // num_tenants, num_tenants
        self._growing: dict[str, tuple[str, int]] = {}
        """Tenant and bytes so far of the files that this process is writing, by id."""
        self._own: OwnFolder | None = None
        try:
            if folder is None and not most_bytes:
                self._database = SharedDatabase("file store", None, _TABLES)
                return
            if folder is None:
                self._own = OwnFolder("files")
                self.folder = self._own.path
            else:
                self.folder = Path(folder)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            warn_of_open_folder("file_store", self.folder)
            make_existing_private(self.folder.glob("*.data"))
            self._database = SharedDatabase("file store", self.folder / "index.sqlite", _TABLES)
        except (OSError, sqlite3.Error) as error:
            named = "file_store" if folder is None else f"file_store={folder}"
            raise OptionError(f"{named}: no folder that can be used ({error}); file_store_bytes=0 keeps none") from None

    def close(self) -> None:
        self._database.close()
        if self._own is not None:
            self._own.close()

    def path(self, id: str) -> Path:
        """The path of a file, by the id that this store gave it."""
        return self.folder / f"{id}.data"

    def append(self, id: str, data: bytes | bytearray) -> None:
        """Writes data at the end of a file, for which `grow` has reserved room. Runs in the store's thread."""
        with open(self.path(id), "ab", opener=private_opener) as file:
            file.write(data)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in the store's thread. Raises StoreError if its index cannot be used, and what work raises."""
        return await self._database.run(work)

    # --- files --------------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """An id for a file that is about to be written."""
        return f"file-{uuid.uuid4().hex}"

    def grow(self, tenant: str, id: str, num_bytes: int) -> None:
        """Reserves room before bytes are written. Runs in the store's thread. Raises FullError if the tenant's share
        has no room."""
        own = "select coalesce(sum(size), 0), count(*) from files where tenant = ?"
        kept, num_files = self._database.execute(own, (tenant,)).fetchone()
        growing = [size for owner, size in self._growing.values() if owner == tenant]
        whose = "of each key " if self._num_tenants > 1 else ""
        if kept + sum(growing) + num_bytes > self._share_bytes:
            raise FullError(f"the server keeps {self._share_bytes} bytes of files {whose}at most, and they are full")
        if num_files + len(growing) >= (most := MOST_FILES // self._num_tenants):
            raise FullError(f"the server keeps {most} files {whose}at most, and there are so many")
        _, size = self._growing.get(id, (tenant, 0))
        self._growing[id] = (tenant, size + num_bytes)

    def release(self, id: str) -> None:
        """Gives back what `grow` reserved for bytes that could not be written."""
        self._growing.pop(id, None)

    def drop(self, id: str) -> None:
        """Deletes a file that was written but not added. Runs in the store's thread."""
        self._growing.pop(id, None)
        self.path(id).unlink(missing_ok=True)

    async def add(self, tenant: str, file: FileObject) -> None:
        """Adds a file that has been written."""
        await self.run(lambda: self.keep(tenant, file))

    def keep(self, tenant: str, file: FileObject) -> None:
        """Adds a file, or updates one to which more was written. Runs in the store's thread."""
        self._forget_expired()
        change = "update files set size = ?, object = ? where tenant = ? and id = ?"
        said = msgspec.json.encode(file)
        if not self._database.execute(change, (file.bytes, said, tenant, file.id)).rowcount:
            values = (tenant, file.id, time.time(), file.expires_at, file.bytes, said)
            self._database.execute("insert into files values (?,?,?,?,?,?)", values)
        self._growing.pop(file.id, None)

    async def file(self, tenant: str, id: str) -> FileObject | None:
        def find() -> FileObject | None:
            self._forget_expired()
            wanted = "select object from files where tenant = ? and id = ?"
            row = self._database.execute(wanted, (tenant, id)).fetchone()
            return None if row is None else msgspec.json.decode(row[0], type=threadsafe(FileObject))

        return await self.run(find)

    async def files(self, tenant: str) -> list[FileObject]:
        """Oldest first."""

        def find() -> list[FileObject]:
            self._forget_expired()
            rows = self._database.execute("select object from files where tenant = ? order by made, id", (tenant,))
            return [msgspec.json.decode(row[0], type=threadsafe(FileObject)) for row in rows]

        return await self.run(find)

    async def delete(self, tenant: str, id: str) -> bool:
        def delete() -> bool:
            gone = "delete from files where tenant = ? and id = ?"
            if not self._database.execute(gone, (tenant, id)).rowcount:
                return False
            self.path(id).unlink(missing_ok=True)
            return True

        return await self.run(delete)

    def _forget_expired(self) -> None:
        expired = self._database.execute("select id from files where expires < ?", (time.time(),)).fetchall()
        for (id,) in expired:
            self._database.execute("delete from files where id = ?", (id,))
            self.path(id).unlink(missing_ok=True)

    # --- batches ------------------------------------------------------------------------------------------------------

    async def add_batch(self, tenant: str, batch: BatchObject) -> None:
        """Raises FullError if too many of the tenant's batches are running."""

        def add() -> None:
            most = max(1, MOST_BATCHES // self._num_tenants)
            running = "select count(*) from batches where tenant = ? and runs > 0"
            (num_running,) = self._database.execute(running, (tenant,)).fetchone()
            if num_running >= most:
                raise FullError(f"{num_running} batches are running, the maximum; try again once one has ended")
            values = (tenant, batch.id, time.time(), heartbeat_s(), FIRST_RUN, msgspec.json.encode(batch))
            self._database.execute("insert into batches values (?,?,?,?,?,?)", values)
            self._database.execute(
                "delete from batches where runs = 0 and tenant = ? and rowid not in "
                "(select rowid from batches where tenant = ? order by made desc limit ?)",
                (tenant, tenant, most),
            )

        await self.run(add)

    async def put_batch(self, tenant: str, batch: BatchObject) -> bool:
        """Updates a batch, from the process that runs it. Returns False once it is being cancelled: then only a final
        status is stored."""

        def put() -> bool:
            runs = batch.status in RUNNING
            kept = self._find_batch(tenant, batch.id)
            is_cancelled = kept is not None and kept.status == "cancelling"
            if is_cancelled and runs:
                hear = "update batches set heard = ? where tenant = ? and id = ?"
                self._database.execute(hear, (heartbeat_s(), tenant, batch.id))
                return False
            if kept is not None:
                batch.cancelling_at = kept.cancelling_at
            self._write_batch(tenant, batch)
            return not is_cancelled

        return await self._database.transact(put)

    async def leave_batch(self, tenant: str, batch: BatchObject) -> None:
        """Gives up a batch, from the process that runs it and cannot continue: any process may take it over."""

        def leave() -> None:
            kept = self._find_batch(tenant, batch.id)
            self._write_batch(tenant, kept if kept is not None and kept.status == "cancelling" else batch)
            gone = "update batches set heard = ? where tenant = ? and id = ?"
            self._database.execute(gone, (NEVER_S, tenant, batch.id))

        await self._database.transact(leave)

    def check_run(self, tenant: str, id: str, run: int) -> None:
        """Called before a run writes results, in the store's thread. Raises TakenError if a later run has begun."""
        row = self._database.execute("select runs from batches where tenant = ? and id = ?", (tenant, id)).fetchone()
        if row is not None and row[0] != run:
            raise TakenError(f"another process goes on with {id}")

    async def take_over(self) -> list[TakenOver]:
        """Takes over batches whose process has ended, except those that have been run too often, which fail."""

        def take() -> list[TakenOver]:
            found = []
            rows = self._database.execute("select tenant, id, heard, runs from batches where runs > 0").fetchall()
            for tenant, id, heard, runs in rows:
                if not is_silent(heard):
                    continue
                try:
                    batch = self._find_batch(tenant, id)
                except msgspec.MsgspecError as error:  # of another version: the others are taken over all the same
                    logger.warning("the record of %s cannot be read: %s", id, error)
                    continue
                if batch is not None and (taken := self._taken(tenant, batch, runs)) is not None:
                    found.append(taken)
            return found

        return await self._database.transact(take)

    def _taken(self, tenant: str, batch: BatchObject, runs: int) -> TakenOver | None:
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", int(time.time())
        elif runs >= MOST_RUNS:
            fail(batch, "server_error", f"what ran this batch has ended {runs} times before it was complete")
        if batch.status in RUNNING:
            again = "update batches set heard = ?, runs = ? where tenant = ? and id = ?"
            self._database.execute(again, (heartbeat_s(), runs + 1, tenant, batch.id))
            return TakenOver(tenant, batch, runs + 1)
        for name, field in ((output_name, "output_file_id"), (error_name, "error_file_id")):
            results = self.results(tenant, name(batch.id))
            setattr(batch, field, None if results is None else results.id)
        self._write_batch(tenant, batch)
        return None

    async def cancel_batch(self, tenant: str, id: str) -> BatchObject | None:
        """Marks a running batch as cancelling. Returns the batch as it is then; None if there is none."""

        def cancel() -> BatchObject | None:
            batch = self._find_batch(tenant, id)
            if batch is not None and batch.status in RUNNING and batch.status != "cancelling":
                batch.status, batch.cancelling_at = "cancelling", int(time.time())
                self._write_batch(tenant, batch)
            return batch

        return await self._database.transact(cancel)

    async def batch(self, tenant: str, id: str) -> BatchObject | None:
        return await self.run(lambda: self._find_batch(tenant, id))

    async def batches(self, tenant: str) -> list[BatchObject]:
        """Oldest first."""

        def find() -> list[BatchObject]:
            rows = self._database.execute("select id from batches where tenant = ? order by made, id", (tenant,))
            found = [self._find_batch(tenant, id) for (id,) in rows.fetchall()]
            return [batch for batch in found if batch is not None]

        return await self.run(find)

    def _find_batch(self, tenant: str, id: str) -> BatchObject | None:
        wanted = "select object from batches where tenant = ? and id = ?"
        row = self._database.execute(wanted, (tenant, id)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=threadsafe(BatchObject))

    def results(self, tenant: str, name: str) -> FileObject | None:
        """A result file of a batch, by its name; None if there is none. Runs in the store's thread."""
        rows = self._database.execute("select object from files where tenant = ?", (tenant,)).fetchall()
        found = (msgspec.json.decode(each, type=threadsafe(FileObject)) for (each,) in rows)
        return next((file for file in found if (file.filename, file.purpose) == (name, RESULTS)), None)

    def _write_batch(self, tenant: str, batch: BatchObject) -> None:
        change = "update batches set heard = ?, runs = iif(?, runs, 0), object = ? where tenant = ? and id = ?"
        values = (heartbeat_s(), batch.status in RUNNING, msgspec.json.encode(batch), tenant, batch.id)
        self._database.execute(change, values)


def output_name(batch_id: str) -> str:
    return f"{batch_id}_output.jsonl"


def error_name(batch_id: str) -> str:
    return f"{batch_id}_error.jsonl"


def fail(batch: BatchObject, code: str, message: str) -> None:
    fail_by(batch, [BatchError(code=code, message=message, param=None, line=None)])


def fail_by(batch: BatchObject, errors: list[BatchError]) -> None:
    batch.status, batch.failed_at = "failed", int(time.time())
    batch.errors = {"object": "list", "data": errors}


def no_room(error: FullError) -> ApiError:
    why = f"{error}: delete some, or start the server with more --file-store-bytes"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why, code="file_store_full")
