"""A SQLite database that the server's HTTP processes share, for the stores of responses and of files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 5.0
"""How long to wait for another process that locks the file."""
_RETRY_S = 0.005


def open_shared(path: str | Path | None, tables: str) -> sqlite3.Connection:
    """Opens the database, None for one in memory, and runs the statements that create its tables. Each statement is
    a transaction of its own, unless in `transaction`. Raises sqlite3.Error."""
    database = sqlite3.connect(path or ":memory:", timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        if path is not None:
            _use_wal(database)
        database.execute("pragma synchronous = normal")
        database.executescript(tables)
    except BaseException:
        database.close()
        raise
    return database


def _use_wal(database: sqlite3.Connection) -> None:
    """Readers and writers wait less for each other with a write-ahead log. SQLite's own timeout does not cover this
    change: where two connections attempt it, one gets SQLITE_BUSY at once, since both hold a lock that the other
    needs."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            database.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the low byte: extended codes add to it
            if not is_busy or time.monotonic() >= end_s:
                raise
        time.sleep(_RETRY_S)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """No other process writes between what is read and what is written in the block. An exception undoes it."""
    database.execute("begin immediate")
    try:
        yield
        database.execute("commit")
    except BaseException:
        if database.in_transaction:
            database.execute("rollback")
        raise
