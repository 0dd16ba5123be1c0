"""What each engine-core tells about itself in the runtime directory: `headrace ps` finds it wherever it listens.

A record is a small JSON file, written when the engine has bound its address, again when it is ready, and removed when
it ends. One that a killed engine leaves is removed by the next start, once its address refuses a connection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.ipc.process.runtime_directory import AddressError, runtime_directory
from headrace.ipc.struct_types import threadsafe
from headrace.ipc.transport.hosts import bare_host

_PATTERN = "engine-*.json"
_ASK_S = 1.0


class EngineRecord(msgspec.Struct, frozen=True):
    address: str
    pid: int
    """In the engine's own container."""
    kernel: str
    """As `this_kernel`: only a record of the same one may be removed, as only there its address can be asked."""
    began_s: float
    """When it bound its address, in seconds of the system's clock."""
    is_ready: bool = False
    keys: str = ""
    """The key file that it listens with, where that is this user's own and not one that somebody names."""


class OwnRecord:
    """The record of this process's engine. Without a runtime directory there is none, and the engine serves all the
    same."""

    def __init__(self, address: str, kernel: str, keys: Path | None = None) -> None:
        self._record = EngineRecord(address, os.getpid(), kernel, time.time(), keys=str(keys or ""))
        self._path: Path | None = None
        with contextlib.suppress(AddressError):
            self._path = runtime_directory() / f"engine-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._write()

    def set_ready(self) -> None:
        self._record = msgspec.structs.replace(self._record, is_ready=True)
        self._write()

    def remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._path = None

    def _write(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(self._record))
            beside.replace(self._path)  # a reader sees the old record or the new one
        except OSError:
            self._path = None


def engine_records() -> list[EngineRecord]:
    """The records of this user's engines, oldest first; some may be of dead ones. Raises AddressError."""
    return sorted((record for _, record in _read(runtime_directory())), key=lambda record: record.began_s)


def keys_of(address: str) -> Path | None:
    """The key file of this user's newest engine at this address, if it has one that is still there."""
    with contextlib.suppress(AddressError):
        for record in reversed(engine_records()):
            if record.address == address:
                return Path(record.keys) if record.keys and os.path.exists(record.keys) else None
    return None


def sweep_records(directory: Path, kernel: str) -> None:
    """Removes the records of engines of this kernel whose address refuses a connection."""
    for path, record in _read(directory):
        if record.kernel == kernel and refuses(record.address):
            path.unlink(missing_ok=True)


def _read(directory: Path) -> Iterator[tuple[Path, EngineRecord]]:
    for path in directory.glob(_PATTERN):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            yield path, msgspec.json.decode(path.read_bytes(), type=threadsafe(EngineRecord))


def refuses(address: str) -> bool:
    """Whether nobody listens at an ipc:// or tcp:// address, as at the leftover of a dead process."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_ASK_S)
                probe.connect(rest)
        else:
            socket.create_connection((bare_host(host), int(port)), _ASK_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError):
        return False  # its listener accepts no connections just now, or cannot be reached from here
    return False
