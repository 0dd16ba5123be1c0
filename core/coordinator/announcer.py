"""An engine tells coordinators that it is there: once a second, and at once when it is about to leave.

`Announcements` is what is said, without I/O; `Announcer` is the thread that says it. Nothing waits for a coordinator:
one that is not there misses what it would have been told, and hears the next.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket as plain_socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.ipc.codec import Codec, CodecError
from headrace.ipc.coordination import (
    ANNOUNCE_EVERY_S,
    SCHEMA_HASH,
    Announce,
    Denied,
    EngineEntry,
    FromCoordinator,
    Withdraw,
)
from headrace.ipc.messages import Load, Welcome
from headrace.ipc.transport.keys import key_file
from headrace.ipc.transport.sockets import HANDSHAKE_FAILED, CutShortError, new_dealer, or_keys, send_whole

logger = logging.getLogger(__name__)
_FEW_MESSAGES = 4
"""That wait for a coordinator: older news is of no use."""
_RECONNECT_MS = (100, 2000)
_PATIENCE_S = 3.0
"""A coordinator may start anew within it without being missed aloud."""
_ANY_HOST = ("0.0.0.0", "[::]", "*", "::")


class State(msgspec.Struct, frozen=True):
    """What changes while an engine serves."""

    load: Load
    is_draining: bool = False


class Announcements:
    """What one life of an engine says of itself."""

    def __init__(self, entry: EngineEntry) -> None:
        self.entry = entry
        self._numbers = itertools.count()

    def next(self, state: State) -> Announce:
        load, entry = state.load, self.entry
        if state.is_draining != entry.is_draining:
            entry = self.entry = msgspec.structs.replace(entry, is_draining=state.is_draining)
        return Announce(
            schema_hash=SCHEMA_HASH,
            entry=entry,
            number=next(self._numbers),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            is_paused=load.is_paused,
        )

    def last(self) -> Withdraw:
        return Withdraw(address=self.entry.address, life=self.entry.life)


def entry_of(welcome: Welcome, address: str, rank: int) -> EngineEntry:
    """Of an engine that has just started."""
    return EngineEntry(
        address=address,
        life=secrets.token_hex(8),
        model=welcome.model,
        served_model_names=welcome.served_model_names or (welcome.model,),
        rank=rank,
        host=plain_socket.gethostname(),
        pid=os.getpid(),
        max_num_seqs=welcome.max_num_seqs,
        max_waiting_requests=min(welcome.max_waiting_requests, (1 << 31) - 1),
        block_size=welcome.block_size,
    )


class Link:
    """The connection to one coordinator, and the log's word on whether it is there."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, patience_s: float) -> None:
        """Raises AddressError and KeyFileError."""
        self._address, self._patience_s = address, patience_s
        self.socket = sock = new_dealer(context, address)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        sock.setsockopt(zmq.IMMEDIATE, True)  # without a coordinator nothing is kept for it
        sock.setsockopt(zmq.SNDHWM, _FEW_MESSAGES)
        self._monitor = sock.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        sock.connect(address)
        self._missing_since_s: float | None = time.monotonic()
        self._why = self._said = ""

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()

    def watch(self, now_s: float) -> None:
        """Takes the connection's news, and says once when it has been missing for too long."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._note(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"], now_s)
        since_s = self._missing_since_s
        if since_s is not None and now_s - since_s >= self._patience_s and self._why not in ("", self._said):
            self._said = self._why
            logger.warning("%s; this engine is not told of there until that changes", self._why)

    def note_foreign(self, now_s: float) -> None:
        """It answers what no coordinator answers."""
        self._missing_since_s = now_s if self._missing_since_s is None else self._missing_since_s
        self._why = f"what listens at {self._address} is no coordinator of this version"

    def _note(self, event: int, now_s: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._said:
                logger.warning("the coordinator at %s is there; this engine is told of", self._address)
            self._missing_since_s, self._why, self._said = None, "", ""
            return
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if event & HANDSHAKE_FAILED:
            others = or_keys(self._address, key_file())
            self._why = f"what listens at {self._address} is no coordinator of this version{others}"
        elif not self._why:  # the end of a connection whose handshake has failed is no other reason
            self._why = f"no coordinator listens at {self._address}"


class Announcer:
    """Announces from its making to `close`, on a thread of its own."""

    def __init__(
        self,
        entry: EngineEntry,
        coordinators: Sequence[str],
        state: Callable[[], State],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`state` is called from that thread; patience_s: how long a coordinator may be missing before the log says so.

        Raises AddressError and KeyFileError."""
        self._announcements, self._state = Announcements(entry), state
        self._codec: Codec[FromCoordinator] = Codec(FromCoordinator)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = [Link(self._context, address, patience_s) for address in coordinators]
        self._denied: set[str] = set()
        self._hurry = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Something has changed that frontends should know at once."""
        self._hurry.set()

    def close(self) -> None:
        """Says that the engine leaves, and waits a moment for that to be sent."""
        self._closing = True
        self._hurry.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._send(self._announcements.next(self._state()))
                for link in self._links:
                    self._read(link)
                    link.watch(time.monotonic())
                self._hurry.wait(ANNOUNCE_EVERY_S)
                self._hurry.clear()
            self._send(self._announcements.last())
        finally:
            for link in self._links:
                link.close()
            self._context.term()

    def _send(self, message: Announce | Withdraw) -> None:
        frames = self._codec.encode(message)
        for link in self._links:
            with contextlib.suppress(zmq.Again, CutShortError):  # the next is sent soon
                send_whole(link.socket, frames[0], frames[1:])

    def _read(self, link: Link) -> None:
        """A coordinator answers only what it cannot take."""
        with contextlib.suppress(zmq.Again):
            while True:
                try:
                    message = self._codec.decode(link.socket.recv_multipart(zmq.NOBLOCK))
                except CodecError:
                    link.note_foreign(time.monotonic())
                    continue
                if isinstance(message, Denied) and message.why not in self._denied:
                    self._denied.add(message.why)
                    logger.error("a coordinator does not take this engine's announcements: %s", message.why)


def reachable(address: str, coordinator: str) -> str:
    """The address under which frontends find an engine that listens on every interface: that of the one by which it
    reaches the coordinator."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in _ANY_HOST or not coordinator.startswith("tcp://"):
        return address
    there, _, there_port = coordinator.removeprefix("tcp://").rpartition(":")
    family = plain_socket.AF_INET6 if ":" in there else plain_socket.AF_INET
    with plain_socket.socket(family, plain_socket.SOCK_DGRAM) as probe:
        probe.connect((there.strip("[]"), int(there_port)))  # sends nothing
        own = probe.getsockname()[0]
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"
