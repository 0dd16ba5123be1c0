"""Engines of this user as `ps` and `top` see them: found by their sockets, asked for their figures and nothing else.

Their sessions fetch no tokenizer, so looking at an engine costs a few milliseconds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import EngineStats, GetStats, Welcome
from headrace.ipc.transport.sockets import check_address, ipc_path, runtime_directory

ANSWER_TIMEOUT_S = 2.0
_SOCKET_NAME = re.compile(r"engine-(?:(\d+)|core-\d+)-[0-9a-f]+\.sock")
"""With the engine's process, or, of one that a server starts again at one address, the server's."""


class EngineSnapshot(msgspec.Struct, kw_only=True):
    """What is known of one engine at one time."""

    address: str
    at_s: float
    """When the figures came (monotonic seconds)."""
    pid: int | None = None
    uptime_s: float | None = None
    """Age of its process; None where that cannot be seen."""
    welcome: Welcome | None = None
    stats: EngineStats | None = None
    problem: str = ""
    """Why figures are missing."""


class EngineWatch:
    """One engine that is looked at again and again, over one session. Everything runs in one asyncio loop."""

    def __init__(self, address: str) -> None:
        """Raises AddressError for what is no address."""
        self.address = check_address(address)
        self._client: CoreClient | None = None
        self._welcome: Welcome | None = None

    @property
    def gone(self) -> bool:
        """The connection was refused or lost: nobody listens there."""
        failure = self._client.failure if self._client is not None else None
        return failure is not None and failure.phase == "connection"

    async def look(self, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineSnapshot:
        """Its figures now; whatever goes wrong is in the result's `problem`."""
        stats, problem = None, ""
        try:
            if self._client is None or self._client.failure is not None:
                self._client = CoreClient(ZmqTransport(self.address))
                await self._client.start(timeout_s, with_tokenizer=False)
                self._welcome = self._client.welcome
            stats = await self._client.call(GetStats, timeout_s)
        except EngineDeadError as error:
            problem = error.failure.message if error.failure is not None else str(error)
        pid = self._welcome.pid if self._welcome is not None else pid_of(self.address)
        return EngineSnapshot(
            address=self.address,
            at_s=time.monotonic(),
            pid=pid,
            uptime_s=None if pid is None or self.gone else _uptime_s(pid),
            welcome=self._welcome,
            stats=stats,
            problem=problem,
        )

    def close(self) -> None:
        """Leaves. May be called again."""
        if self._client is not None:
            self._client.leave()


def engine_addresses() -> list[str]:
    """Every engine's socket in the runtime directory, oldest first; some may be left over from dead engines.

    Raises AddressError when the directory cannot be used.
    """
    found: list[tuple[float, str]] = []
    for path in runtime_directory().glob("engine-*.sock"):
        try:
            if _SOCKET_NAME.fullmatch(path.name) and path.is_socket():
                found.append((path.stat().st_mtime, f"ipc://{path}"))
        except OSError:
            continue  # it went away meanwhile
    return [address for _, address in sorted(found)]


async def look_at(addresses: Sequence[str], *, with_gone: bool = False) -> list[EngineSnapshot]:
    """One look at each, all at once. Those where nobody listens are left out, unless `with_gone`.

    Raises AddressError.
    """
    watches = [EngineWatch(address) for address in addresses]
    try:
        snapshots = await asyncio.gather(*(watch.look() for watch in watches))
    finally:
        for watch in watches:
            watch.close()
    return [snapshot for watch, snapshot in zip(watches, snapshots, strict=True) if with_gone or not watch.gone]


def check_seen(snapshots: Sequence[EngineSnapshot]) -> None:
    """Raises EngineDeadError for engines that were asked for by address and gave no figures."""
    told = [each.problem if each.address in each.problem else f"{each.address} {each.problem}" for each in snapshots]
    problems = [text for text, snapshot in zip(told, snapshots, strict=True) if snapshot.stats is None]
    if problems:
        raise EngineDeadError(
            "; ".join(problems),
            hint="An engine-core prints its address when it is ready, and `headrace ps` lists those that run.",
        )


def pid_of(address: str) -> int | None:
    """The process that a socket of the runtime directory belongs to, by its name."""
    path = ipc_path(address)
    match = _SOCKET_NAME.fullmatch(path.name) if path is not None else None
    return int(match.group(1)) if match is not None and match.group(1) else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns; the last column is as wide as it likes."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def short_name(model: str, longest: int = 40) -> str:
    """A model's name that fits a column; of a path, its end."""
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
