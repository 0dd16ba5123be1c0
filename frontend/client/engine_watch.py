"""Finds this user's engines by their records and reads their statistics, for `ps` and `top`.

These sessions fetch no tokenizer, so querying an engine takes only a few milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import EngineStats, GetStats, Welcome
from headrace.ipc.process.runtime_directory import AddressError
from headrace.ipc.transport.engine_records import EngineRecord, engine_records
from headrace.ipc.transport.sockets import check_address

ANSWER_TIMEOUT_S = 2.0


class EngineSnapshot(msgspec.Struct, kw_only=True):
    """The state of one engine at one time."""

    address: str
    at_s: float
    """When the statistics were received (monotonic seconds)."""
    pid: int | None = None
    uptime_s: float | None = None
    """Age of its process; None if it is not visible."""
    welcome: Welcome | None = None
    stats: EngineStats | None = None
    problem: str = ""
    """Why the statistics are missing."""


class EngineWatch:
    """Queries one engine repeatedly, over one session. Everything runs in one asyncio loop."""

    def __init__(self, address: str, *, is_listed: bool = False) -> None:
        """Raises AddressError for an address that cannot be used, unless `is_listed`: then nobody asked for this engine
        by name, and the reason is its snapshots' problem."""
        self.address, self._refusal = address, ""
        try:
            self.address = check_address(address)
        except AddressError as error:
            if not is_listed:
                raise
            self._refusal = str(error)
        self._client: CoreClient | None = None
        self._welcome: Welcome | None = None

    @property
    def gone(self) -> bool:
        """The connection was refused or lost: nobody listens there."""
        failure = self._client.failure if self._client is not None else None
        return failure is not None and failure.phase == "connection"

    async def look(self, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineSnapshot:
        """Reads the statistics now; any error is reported in the result's `problem`."""
        stats, problem = None, self._refusal
        try:
            stats = await self._ask(timeout_s) if not problem else None
        except EngineDeadError as error:
            problem = error.failure.message if error.failure is not None else str(error)
        record = None if self._welcome is not None or self.gone else record_of(self.address)
        pid = self._welcome.pid if self._welcome is not None else None if record is None else record.pid
        if record is not None and not record.is_ready and not self._refusal:
            problem = "it is starting"
        return EngineSnapshot(
            address=self.address,
            at_s=time.monotonic(),
            pid=pid,
            uptime_s=None if pid is None or self.gone else _uptime_s(pid),
            welcome=self._welcome,
            stats=stats,
            problem=problem,
        )

    async def _ask(self, timeout_s: float) -> EngineStats:
        if self._client is None or self._client.failure is not None:
            self._client = CoreClient(ZmqTransport(self.address))
            await self._client.start(timeout_s, with_tokenizer=False)
            self._welcome = self._client.welcome
        stats: EngineStats = await self._client.call(GetStats, timeout_s)
        return stats

    def close(self) -> None:
        """Ends the session. May be called again."""
        if self._client is not None:
            self._client.leave()


def engine_addresses() -> list[str]:
    """The addresses of this user's engines, oldest first; some may belong to dead engines.

    Raises AddressError if the runtime directory cannot be used.
    """
    return [record.address for record in engine_records()]


async def look_at(addresses: Sequence[str], *, are_listed: bool = True) -> list[EngineSnapshot]:
    """Queries each engine once, all concurrently. are_listed: as by `engine_addresses`; then those without a listener
    are left out. Raises AddressError for addresses that somebody named and that cannot be used."""
    watches = [EngineWatch(address, is_listed=are_listed) for address in addresses]
    try:
        snapshots = await asyncio.gather(*(watch.look() for watch in watches))
    finally:
        for watch in watches:
            watch.close()
    return [snapshot for watch, snapshot in zip(watches, snapshots, strict=True) if not are_listed or not watch.gone]


def check_seen(snapshots: Sequence[EngineSnapshot]) -> None:
    """Raises EngineDeadError for engines whose statistics are missing."""
    told = [each.problem if each.address in each.problem else f"{each.address} {each.problem}" for each in snapshots]
    problems = [text for text, snapshot in zip(told, snapshots, strict=True) if snapshot.stats is None]
    if problems:
        raise EngineDeadError(
            "; ".join(problems),
            hint="An engine-core prints its address when it is ready, and `headrace ps` lists those that run.",
        )


def record_of(address: str) -> EngineRecord | None:
    """What the newest engine at this address tells of itself; None for one of another user or host."""
    with contextlib.suppress(AddressError):
        return next((record for record in reversed(engine_records()) if record.address == address), None)
    return None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns; the last column has any width."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def short_name(model: str, longest: int = 40) -> str:
    """A model's name, shortened to fit a column; for a path, its last part."""
    name = model.rstrip("/").rpartition("/")[2] if model.startswith(("/", ".", "~")) else model
    return name if len(name) <= longest else "..." + name[-(longest - 3) :]


def duration(seconds: float | None) -> str:
    """`42s`, `3m05s`, `2h07m`, `3d04h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"


def _uptime_s(pid: int) -> float | None:
    import psutil

    try:
        created_s: float = psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return max(0.0, time.time() - created_s)
