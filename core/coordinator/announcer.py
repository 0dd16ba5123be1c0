"""An engine's announcements to coordinators: one per second, one at once to a coordinator that has just been connected,
and one before the engine leaves.

`Announcements` makes the messages, without I/O; `Announcer` is the thread that sends them. The engine never waits for a
coordinator: one that is not running misses announcements, and gets the next.
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
    Announcement,
    Denied,
    Ended,
    EngineEntry,
    FromCoordinator,
    Withdraw,
    signed,
)
from headrace.ipc.failure import let_interrupts_pass
from headrace.ipc.messages import Load, Welcome
from headrace.ipc.transport.hosts import bare_host, host_port, needs_ipv6
from headrace.ipc.transport.keys import key_file, read_keys
from headrace.ipc.transport.sockets import (
    HANDSHAKE_FAILED,
    CutShortError,
    address_to_dial,
    check_address,
    ipc_path,
    is_ipv6,
    new_dealer,
    or_keys,
    send_whole,
)

logger = logging.getLogger(__name__)
_FEW_MESSAGES = 4
"""Most messages queued for a coordinator: older announcements are of no use."""
_RECONNECT_MS = (100, 2000)
_PATIENCE_S = 3.0
"""Time after which the log reports a missing coordinator; one that restarts sooner is not reported."""
_ANY_HOST = ("0.0.0.0", "[::]", "*", "::")


class AnnouncedState(msgspec.Struct, frozen=True):
    """The part of an announcement that changes while an engine serves."""

    load: Load
    is_draining: bool = False


class Announcements:
    """Makes the numbered messages of one run of an engine (its `life`)."""

    def __init__(self, entry: EngineEntry, secret: str = "") -> None:
        """secret: the engines' secret key, where there are keys."""
        self.entry, self._secret = entry, secret
        self._numbers = itertools.count()

    def next(self, state: AnnouncedState) -> Announce:
        load, entry = state.load, self.entry
        if state.is_draining != entry.is_draining:
            entry = self.entry = msgspec.structs.replace(entry, is_draining=state.is_draining)
        return self._signed(
            Announce(
                schema_hash=SCHEMA_HASH,
                entry=entry,
                number=next(self._numbers),
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                is_paused=load.is_paused,
            )
        )

    def last(self) -> Withdraw:
        return self._signed(Withdraw(address=self.entry.address, life=self.entry.life))

    def renew(self) -> None:
        """Begins another life, for an engine that a coordinator takes for gone."""
        self.entry = msgspec.structs.replace(self.entry, life=secrets.token_hex(8))

    def _signed(self, message: Announcement) -> Announcement:
        return signed(message, self._secret) if self._secret else message


def entry_of(welcome: Welcome, address: str, rank: int) -> EngineEntry:
    """The entry of an engine that has just started."""
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


class CoordinatorLink:
    """The connection to one coordinator; logs when the coordinator is missing and when it is back."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, patience_s: float) -> None:
        """Raises AddressError and KeyFileError."""
        self._address, self._patience_s = (address := check_address(address)), patience_s
        self._dialled = address_to_dial(address)
        self.socket = sock = new_dealer(context, self._dialled)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        sock.setsockopt(zmq.IMMEDIATE, True)  # queues nothing while the coordinator is not connected
        sock.setsockopt(zmq.SNDHWM, _FEW_MESSAGES)
        self._monitor = sock.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        sock.connect(self._dialled)
        self._missing_since_s: float | None = time.monotonic()
        self._why = self._said = ""

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()

    @property
    def readable(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The sockets that have messages when there is something to read or to watch."""
        return self.socket, self._monitor

    def watch(self, now_s: float) -> bool:
        """Handles connection events, and logs once if the coordinator has been missing for patience_s.

        Returns whether it has been connected since, and so has missed what was announced before.
        """
        is_connected_anew = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                is_connected_anew |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._note(event, now_s)
        since_s = self._missing_since_s
        if since_s is not None:
            self._dial_again()
        if since_s is not None and now_s - since_s >= self._patience_s and self._why not in ("", self._said):
            self._said = self._why
            logger.warning("%s; this engine is not announced there until that changes", self._why)
        return is_connected_anew

    def _dial_again(self) -> None:
        """A coordinator at localhost may come to listen at the other loopback address than was dialled."""
        dialled = address_to_dial(self._address)
        if dialled != self._dialled:
            self.socket.disconnect(self._dialled)
            self.socket.setsockopt(zmq.IPV6, is_ipv6(dialled))
            self.socket.connect(dialled)
            self._dialled = dialled

    def note_foreign(self, now_s: float) -> None:
        """Notes that the peer's answers are not a coordinator's."""
        self._missing_since_s = now_s if self._missing_since_s is None else self._missing_since_s
        self._why = f"what listens at {self._address} is no coordinator of this version"

    def _note(self, event: int, now_s: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._said:
                logger.warning("the coordinator at %s is connected: this engine is announced there", self._address)
            self._missing_since_s, self._why, self._said = None, "", ""
            return
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if event & HANDSHAKE_FAILED:
            others = or_keys(self._address, key_file())
            self._why = f"what listens at {self._address} is no coordinator of this version{others}"
        elif not self._why:  # a disconnect after a failed handshake must not replace that reason
            self._why = f"no coordinator listens at {self._address}"


class Announcer:
    """Announces an engine from `start` to `close`, on its own thread."""

    def __init__(
        self,
        entry: EngineEntry,
        coordinators: Sequence[str],
        state: Callable[[], AnnouncedState],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """state: called on the announcer's thread. patience_s: the log reports a coordinator missing for so long.

        Raises AddressError and KeyFileError."""
        keys_path = key_file() if any(ipc_path(address) is None for address in coordinators) else None
        secret = read_keys(keys_path).engine.secret_key if keys_path else ""
        self._announcements, self._state = Announcements(entry, secret), state
        self._codec: Codec[FromCoordinator] = Codec(FromCoordinator)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = [CoordinatorLink(self._context, address, patience_s) for address in coordinators]
        self._denied: set[str] = set()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for each in (self._wake_fd, *(each for link in self._links for each in link.readable)):
            self._poller.register(each, zmq.POLLIN)
        self._due_s = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Sends the next announcement at once, for a change that frontends should know immediately."""
        self._wake()

    def close(self) -> None:
        """Announces that the engine leaves, and waits up to 2 s for the message to be sent."""
        self._closing = True
        self._wake()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._work()
                except BaseException as error:  # without this thread coordinators would take the engine for gone
                    let_interrupts_pass(error)
                    logger.exception("the engine could not be announced; trying again")
                self._poller.poll(int(max(0.0, self._due_s - time.monotonic()) * 1e3) + 1)
            self._send(self._announcements.last())
        finally:
            for link in self._links:
                link.close()
            self._context.term()

    def _work(self) -> None:
        """Reads what has come, and announces the engine where that is due or somebody waits for it."""
        now_s = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
            self._due_s = now_s
        for link in self._links:
            if link.watch(now_s):
                self._due_s = now_s
            self._read(link)
        if now_s >= self._due_s:
            self._due_s = now_s + ANNOUNCE_EVERY_S  # first, so that an error is not repeated at once
            self._send(self._announcements.next(self._state()))

    def _send(self, message: Announce | Withdraw) -> None:
        frames = self._codec.encode(message)
        for link in self._links:
            with contextlib.suppress(zmq.Again, CutShortError):  # the next announcement follows soon
                send_whole(link.socket, frames[0], frames[1:])

    def _read(self, link: CoordinatorLink) -> None:
        """Reads a coordinator's answers. It answers only announcements that it refuses or takes for an ended life's."""
        with contextlib.suppress(zmq.Again):
            while True:
                try:
                    message = self._codec.decode(link.socket.recv_multipart(zmq.NOBLOCK))
                except CodecError:
                    link.note_foreign(time.monotonic())
                    continue
                if isinstance(message, Ended):
                    self._live_on(message)
                elif isinstance(message, Denied) and message.why not in self._denied:
                    self._denied.add(message.why)
                    logger.error("a coordinator refuses this engine's announcements: %s", message.why)

    def _live_on(self, ended: Ended) -> None:
        """Announces the engine anew: a coordinator takes it for gone, and it is here."""
        entry = self._announcements.entry
        if not self._closing and (ended.address, ended.life) == (entry.address, entry.life):
            logger.warning("a coordinator had lost this engine; it is announced again")
            self._announcements.renew()
            self._due_s = time.monotonic()


def reachable(address: str, coordinator: str) -> str:
    """The address at which frontends reach an engine. If the engine listens on every interface, it is the address of
    the interface through which it reaches the coordinator."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in _ANY_HOST or not coordinator.startswith("tcp://"):
        return address
    there, _, there_port = coordinator.removeprefix("tcp://").rpartition(":")
    family = plain_socket.AF_INET6 if needs_ipv6(bare_host(there)) else plain_socket.AF_INET
    with plain_socket.socket(family, plain_socket.SOCK_DGRAM) as probe:
        probe.connect((bare_host(there), int(there_port)))  # sends nothing
        own = probe.getsockname()[0]
    return f"tcp://{host_port(own, port)}"
