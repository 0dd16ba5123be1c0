"""A SQLite database that the server's HTTP processes share: of the stores of responses and of files.

A process that generates a response or runs a batch stores heartbeats, by which the others know that it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.private_files import make_existing_private, make_private

T = TypeVar("T")
logger = logging.getLogger(__name__)
_WAIT_S = 5.0
"""How long to wait for another process that locks the file."""
_RETRY_S = 0.005

SILENT_S = 30.0
"""A process that has sent no heartbeat for this long counts as gone: its work fails or is taken over."""

NEVER_S = -1e9
"""The heartbeat of work that its process has given up in good order: others may take it over at once."""


class StoreError(HeadraceError):
    """A store cannot be used now: its disk is full, say, or another process locks its file for too long."""


class SharedDatabase:
    """A connection to the database, and the one thread that uses it, as a disk may be slow.

    Each statement is a transaction of its own, except in `transact`.
    """

    def __init__(self, name: str, path: str | Path | None, tables: str) -> None:
        """name: of the store, for errors. path: None for memory. tables: the statements that create the tables.
        Raises sqlite3.Error or OSError for a file that cannot be used."""
        self._name, self._path = name, path
        if path is not None:  # SQLite gives the files beside it the same mode
            make_private(Path(path))
            make_existing_private(Path(f"{path}{end}") for end in ("-wal", "-shm", "-journal"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name.replace(" ", "-"))
        self._connection = sqlite3.connect(
            path or ":memory:", timeout=_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            if path is not None:
                self._use_wal()
            self._connection.execute("pragma synchronous = normal")
            self._connection.executescript(tables)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._thread.shutdown()
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in the thread. Raises StoreError if a statement fails."""

        def guarded() -> T:
            try:
                return work()
            except sqlite3.DatabaseError as error:
                logger.warning("the %s at %s cannot be used now: %s", self._name, self._path, error)
                raise StoreError(f"the server's {self._name} cannot be used now: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    async def transact(self, work: Callable[[], T]) -> T:
        """Runs work that reads what it then changes: no other process writes in between. If it raises, nothing is
        changed."""

        def transaction() -> T:
            self._connection.execute("begin immediate")
            try:
                result = work()
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise
            return result

        return await self.run(transaction)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Runs in the thread."""
        return self._connection.execute(statement, values)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Runs in the thread."""
        self._connection.executemany(statement, rows)

    def _use_wal(self) -> None:
        """Readers and writers wait less for each other with a write-ahead log. SQLite's own timeout does not cover
        this change: where two connections attempt it, one gets SQLITE_BUSY at once, since both hold a lock that the
        other needs."""
        end_s = time.monotonic() + _WAIT_S
        while True:
            try:
                self._connection.execute("pragma journal_mode = wal")
                return
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # extended codes add higher bits
                if not is_busy or time.monotonic() >= end_s:
                    raise
            time.sleep(_RETRY_S)


def heartbeat_s() -> float:
    """The time to store as a heartbeat, by the monotonic clock, which all processes of a machine share: the wall clock
    may be set, which must not make a process look dead."""
    return time.monotonic()


def is_silent(heard_s: float) -> bool:
    """Whether the process is gone. A time in the future was stored before the machine booted, so its process is too."""
    return not 0.0 <= time.monotonic() - heard_s <= SILENT_S
