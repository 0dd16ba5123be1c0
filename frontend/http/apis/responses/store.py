"""The store of the Responses API: responses and their input items. Each
tenant, which is the owner of an API key, has a share of it, in which the least recently used are evicted first.

It is a SQLite database in memory, or in a file that the server's HTTP processes share and that outlives them.
Methods raise StoreError while it cannot be used.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.frontend.http.server.shared_database import SharedDatabase, heartbeat_s, is_silent
from headrace.ipc.failure import OptionError

IN_PROGRESS = ("queued", "in_progress")
_WITH_ITEMS = ("completed", "incomplete")
"""States in which a response's items can be referred to."""
MOST_TURNS = 4096
_TABLES = """
create table if not exists responses (
    tenant text, id text, status text, previous text, response blob, input blob,
    used real, heard real, size integer, primary key (tenant, id));
create index if not exists by_use on responses (used, size);
create table if not exists items (
    tenant text, id text, response text, primary key (tenant, id)) without rowid;
create index if not exists items_by_response on items (tenant, response);
create trigger if not exists forget_items after delete on responses begin
    delete from items where tenant = old.tenant and response = old.id; end;
"""
_ITEM_BYTES = 256
"""About what the table and the index of items take for each."""


class Stored(msgspec.Struct, frozen=True):
    id: str
    status: str
    previous: str | None
    response: bytes
    """The response as JSON."""
    input: bytes
    """The request's input items, as JSON."""

    def items(self) -> list[dict[str, Any]]:
        """The input and output items of this turn."""
        asked: list[dict[str, Any]] = msgspec.json.decode(self.input)
        answered: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return asked + answered


class ResponseStore:
    def __init__(self, path: str | None, most_bytes: int, tenants: Sequence[str] = ("",)) -> None:
        """path: None for memory. most_bytes: 0 stores nothing. tenants: those among whom it is divided; what others
        have left makes room first. Raises OptionError for a file that cannot be used."""
        self.most_bytes, self.is_shared = most_bytes, path is not None
        self._tenants, self._share_bytes = tuple(tenants), most_bytes // len(tenants)
        try:
            self._database = SharedDatabase("response store", path, _TABLES)
        except (OSError, sqlite3.Error) as error:
            raise OptionError(f"response_store={path}: no database that can be used ({error})") from None

    def close(self) -> None:
        self._database.close()

    async def put(self, tenant: str, stored: Stored) -> bool:
        """Updates a response. Returns False and changes nothing if it is not in progress, as after a cancellation."""
        return await self._database.transact(lambda: self._put(tenant, stored, is_new=False))

    async def add(self, tenant: str, stored: Stored) -> None:
        """Stores a new response."""
        await self._database.transact(lambda: self._put(tenant, stored, is_new=True))

    async def get(self, tenant: str, id: str) -> Stored | None:
        return await self._database.run(lambda: self._get(tenant, id))

    async def delete(self, tenant: str, id: str) -> bool:
        def delete() -> bool:
            key = "delete from responses where tenant = ? and id = ?"
            return self._database.execute(key, (tenant, id)).rowcount > 0

        return await self._database.run(delete)

    async def history(self, tenant: str, id: str) -> tuple[list[dict[str, Any]], str | None]:
        """The items of a response and of all that it follows, oldest first, and None; or no items, and the id of a
        response that is missing or not complete."""
        return await self._database.run(lambda: self._history(tenant, id))

    async def items(self, tenant: str, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Those of the items that stored responses have, as input or output, by their ids."""
        return await self._database.run(lambda: self._items(tenant, ids))

    async def is_wanted(self, tenant: str, id: str) -> bool:
        """Stores a heartbeat for a response of this process. Returns False once it was cancelled or deleted."""

        def hear() -> bool:
            change = "update responses set heard = ? where tenant = ? and id = ? and status in (?, ?)"
            return self._database.execute(change, (heartbeat_s(), tenant, id, *IN_PROGRESS)).rowcount > 0

        return await self._database.run(hear)

    def _put(self, tenant: str, stored: Stored, *, is_new: bool) -> bool:
        items = stored.items() if stored.status in _WITH_ITEMS else []
        size = len(stored.response) + len(stored.input) + _ITEM_BYTES * len(items)
        times_s = (time.time(), heartbeat_s())
        values = (stored.status, stored.previous, stored.response, stored.input, *times_s, size, tenant, stored.id)
        if is_new:
            self._database.execute(
                "insert or replace into responses "
                "(status, previous, response, input, used, heard, size, tenant, id) values (?,?,?,?,?,?,?,?,?)",
                values,
            )
        elif not self._database.execute(
            "update responses set status=?, previous=?, response=?, input=?, used=?, heard=?, size=? "
            "where tenant = ? and id = ? and status in (?, ?)",
            (*values, *IN_PROGRESS),
        ).rowcount:
            return False
        rows = [(tenant, item["id"], stored.id) for item in items]
        self._database.executemany("insert or replace into items (tenant, id, response) values (?, ?, ?)", rows)
        self._make_room(tenant)
        return True

    def _items(self, tenant: str, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        holder = "select response from items where tenant = ? and id = ?"
        holders = [self._database.execute(holder, (tenant, id)).fetchone() for id in ids]
        found: dict[str, dict[str, Any]] = {}
        for response in dict.fromkeys(row[0] for row in holders if row is not None):
            stored = self._get(tenant, response)
            found |= {item["id"]: item for item in (stored.items() if stored is not None else ())}
        return {id: found[id] for id in ids if id in found}

    def _make_room(self, tenant: str) -> None:
        """Evicts the tenant's own responses if they exceed its share, then those of tenants that are not known now."""
        self._evict("tenant = ?", [tenant], self._share_bytes)
        (total,) = self._database.execute("select coalesce(sum(size), 0) from responses").fetchone()
        if total > self.most_bytes:
            known = ", ".join("?" * len(self._tenants))
            self._evict(f"tenant not in ({known})", self._tenants, 0, at_most=total - self.most_bytes)

    def _evict(self, which: str, values: Sequence[str], most_bytes: int, at_most: int | None = None) -> None:
        """Evicts the least recently used of some responses until they have most_bytes, or at_most bytes are freed."""
        (total,) = self._database.execute(
            f"select coalesce(sum(size), 0) from responses where {which}", values
        ).fetchone()
        excess = total - most_bytes if at_most is None else min(total - most_bytes, at_most)
        if excess <= 0:
            return
        gone: list[Sequence[Any]] = []
        rows = self._database.execute(f"select rowid, size from responses where {which} order by used", values)
        for row, size in rows:
            gone.append((row,))
            excess -= size
            if excess <= 0:
                break
        self._database.executemany("delete from responses where rowid = ?", gone)

    def _get(self, tenant: str, id: str) -> Stored | None:
        wanted = "select status, previous, response, input, heard from responses where tenant = ? and id = ?"
        row = self._database.execute(wanted, (tenant, id)).fetchone()
        if row is None:
            return None
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk can still be read
            touch = "update responses set used = ? where tenant = ? and id = ?"
            self._database.execute(touch, (time.time(), tenant, id))
        status, previous, response, asked, heard_s = row
        if status in IN_PROGRESS and self.is_shared and is_silent(heard_s):
            failed = msgspec.json.decode(response)
            error = {"code": "server_error", "message": "the process that generated this response has ended"}
            status, failed = "failed", {**failed, "status": "failed", "error": error}
            response = msgspec.json.encode(failed)
            self._put(tenant, Stored(id, status, previous, response, asked), is_new=False)
        return Stored(id, status, previous, response, asked)

    def _history(self, tenant: str, id: str) -> tuple[list[dict[str, Any]], str | None]:
        turns: list[Stored] = []
        next_id: str | None = id
        while next_id is not None and len(turns) < MOST_TURNS:
            turn = self._get(tenant, next_id)
            if turn is None or turn.status in (*IN_PROGRESS, "failed", "cancelled"):
                return [], next_id
            turns.append(turn)
            next_id = turn.previous
        return [item for turn in reversed(turns) for item in turn.items()], next_id
