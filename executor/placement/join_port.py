"""The port at which nodes join: served before the proof of the key as cheaply as possible, beside each other.

    stranger, at most MOST_STRANGERS  --- claims, proof within PROOF_WITHIN_S --->  member: `on_member`, on its thread

A stranger may send HELLO_BYTES + PROOF_BYTES, and nothing of it is decoded by a codec. Where there is no room for
another, the oldest one of the address with the most is dropped: its node, if it is one, tries again.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from headrace.core.options.engine_options import Options
from headrace.executor.placement.cluster_proof import (
    CORE,
    HELLO_BYTES,
    NODE,
    OTHER_KEY,
    PROOF_BYTES,
    REFUSED,
    NoProofError,
    PeerClaims,
    Proofs,
)
from headrace.ipc.failure import OptionError
from headrace.ipc.transport.channel import Seal
from headrace.ipc.transport.hosts import host_port, listening

logger = logging.getLogger(__name__)
MOST_STRANGERS = 64
PROOF_WITHIN_S = 5.0
BACKLOG = 1024
ACCEPTS_A_TURN = 32
"""Strangers taken before those that are here are served again."""
PAUSE_S = 0.1
"""The pause after a connection could not be accepted for lack of descriptors or memory."""
LOG_EVERY_S = 1.0
"""Strangers are many or none: the log has one line about them for this time."""
OnMember = Callable[[socket.socket, str, PeerClaims, Seal], None]
"""Gets a node's connection, where it is, its own claims and the seal of its messages."""


class _Stranger:
    """A connection without proof yet."""

    def __init__(self, sock: socket.socket, address: tuple[str, int]) -> None:
        self.sock, self.host, self.where = sock, address[0], host_port(*address[:2])
        self.ends_s = time.monotonic() + PROOF_WITHIN_S
        self.received = b""
        self.hello: PeerClaims | None = None
        self.proofs: Proofs | None = None


class JoinPort:
    """Listens, on a thread of its own, from its construction to `close`."""

    def __init__(self, options: Options, key: str, on_member: OnMember) -> None:
        """Raises OptionError if it cannot listen."""
        self._options, self._key, self._on_member = options, key, on_member
        try:
            self._listener = listening(options.master_addr, options.master_port, BACKLOG)
        except OSError as error:
            where = host_port(options.master_addr, options.master_port)
            raise OptionError(
                f"the other nodes cannot be waited for at {where} (master_addr, master_port): {error}"
            ) from error
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._refused, self._next_log_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._wake_write.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while True:
                for ready, _ in self._selector.select(self._wait_s()):
                    if ready.fileobj is self._wake_read:
                        return
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif stranger := self._strangers.get(ready.fileobj):  # type: ignore[call-overload]
                        self._hear(stranger)  # unless it was dropped in this turn
                self._drop_late()
        finally:
            for sock in (*self._strangers, self._listener, self._wake_read):
                sock.close()
            self._selector.close()

    def _wait_s(self) -> float | None:
        """Until the oldest stranger's time is over."""
        for stranger in self._strangers.values():
            return max(0.0, stranger.ends_s - time.monotonic())
        return None

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, no memory: what strangers hold is given up first
                self._drop_for(f"no connection can be accepted ({error})")
                time.sleep(PAUSE_S)
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop_for(f"{MOST_STRANGERS} others wait to prove their key")
            stranger = self._strangers[sock] = _Stranger(sock, address)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
            self._hear(stranger)  # a node sends its claims as soon as it is connected

    def _hear(self, stranger: _Stranger) -> None:
        """Reads what a stranger has sent, and answers it. Drops it where that is not what a node sends."""
        try:
            while stranger.sock in self._strangers:  # what a member sends is its own thread's
                missing = (HELLO_BYTES if stranger.hello is None else PROOF_BYTES) - len(stranger.received)
                part = stranger.sock.recv(missing)
                if not part:
                    raise NoProofError("it closed the connection")
                stranger.received += part
                if len(part) == missing:
                    self._advance(stranger)
        except BlockingIOError:
            return
        except (NoProofError, OSError) as error:
            self._drop(stranger, str(error))

    def _advance(self, stranger: _Stranger) -> None:
        """Takes whole claims or a whole proof."""
        received, stranger.received = stranger.received, b""
        if stranger.proofs is None or stranger.hello is None:
            stranger.hello = PeerClaims.decode(received)
            own = PeerClaims.of(self._options).encode()
            stranger.proofs = Proofs(self._key, core=own, node=received)
            _send(stranger.sock, own)
            return
        if not hmac.compare_digest(received, stranger.proofs.of(NODE)):
            with contextlib.suppress(NoProofError, OSError):
                _send(stranger.sock, REFUSED)
            raise NoProofError(OTHER_KEY)
        _send(stranger.sock, stranger.proofs.of(CORE))
        self._admit(stranger, stranger.hello, stranger.proofs.seal(CORE, NODE))

    def _admit(self, stranger: _Stranger, hello: PeerClaims, seal: Seal) -> None:
        """Passes a proven node on, on a thread of its own: from here on it may take its time."""
        del self._strangers[stranger.sock]
        self._selector.unregister(stranger.sock)
        threading.Thread(
            target=self._on_member, args=(stranger.sock, stranger.where, hello, seal), name="join", daemon=True
        ).start()

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.ends_s <= now_s]:
            self._drop(stranger, f"it did not prove within {PROOF_WITHIN_S:g} s that it knows the cluster's key")

    def _drop_for(self, why: str) -> None:
        """Drops the oldest stranger of the address that has the most: other addresses keep their turns."""
        if self._strangers:
            counts = collections.Counter(each.host for each in self._strangers.values())
            (host, _), *_ = counts.most_common(1)
            self._drop(next(each for each in self._strangers.values() if each.host == host), why)

    def _drop(self, stranger: _Stranger, why: str) -> None:
        if self._strangers.pop(stranger.sock, None) is None:
            return
        self._selector.unregister(stranger.sock)
        stranger.sock.close()
        self._refused += 1
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            logger.warning("a node at %s was refused (the %dth): %s", stranger.where, self._refused, why)


def _send(sock: socket.socket, data: bytes) -> None:
    """A new connection has room for a proof; one that has none is no node's."""
    if sock.send(data, socket.MSG_NOSIGNAL) != len(data):
        raise NoProofError("it does not read")
