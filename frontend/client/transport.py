"""Transports of a client's messages to a core: over ZeroMQ, or in memory to a core in the same process.

A transport belongs to one asyncio loop: methods that are not documented as thread-safe are called there, and so are the
callbacks. `on_closed` is called at most once, after the last message, and not after `close`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from headrace.ipc.codec import Codec, CodecError
from headrace.ipc.failure import Failure, InvalidRequestError
from headrace.ipc.messages import ClientMessage, CoreMessage, Goodbye, Hello
from headrace.ipc.process.resources import check_files_left
from headrace.ipc.transport.keys import key_file
from headrace.ipc.transport.sockets import (
    HANDSHAKE_FAILED,
    LINGER_MS,
    MOST_HEADER_BYTES,
    AddressError,
    CutShortError,
    address_to_dial,
    check_address,
    has_input,
    ipc_path,
    new_dealer,
    or_keys,
    receive_whole,
    send_whole,
)

logger = logging.getLogger(__name__)

OnMessage = Callable[[Any], None]
"""Called with each incoming message: from a core, a CoreMessage."""
OnClosed = Callable[[Failure], None]

CONNECTION_LOST = "ConnectionLost"
"""A Failure's type: the connection was lost, and nothing more is known."""
MESSAGE_LOST = "MessageLost"
"""A Failure's type: this side could not send, receive or handle a message, so the session cannot continue."""
_MESSAGES_PER_TURN, _TURN_S = 64, 0.004
"""Limits, in messages and seconds, of receiving before the loop's other work gets its turn."""
MOST_UNSENT_BYTES = 256_000_000
"""Limit of unsent messages to a core that does not read, for example because it is stopped."""


class Transport(Protocol):
    """The connection of one session to a core and back: ordered, and lossless until it is closed."""

    address: str

    @property
    def is_full(self) -> bool:
        """So much is waiting to be sent that further requests should be refused."""
        ...

    def open(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Opens the connection. Raises AddressError for an address that cannot be used."""
        ...

    def send(self, message: Any) -> None:
        """Queues the message; never blocks. Does nothing once closed. Raises MemoryError, and InvalidRequestError for a
        message larger than the other side accepts; it is not queued then."""
        ...

    def close(self) -> None:
        """Closes it, once the sent messages have left or half a second has passed. May be called again."""
        ...


class CorePort(Protocol):
    """How to reach a core in this process (core/engine/memory_port.py). Any thread may call."""

    def open(self, hello: Hello, deliver: Callable[[CoreMessage], None]) -> int:
        """Begins a session, in which `deliver` gets the core's messages. Returns the client's number."""
        ...

    def receive(self, client: int, message: ClientMessage) -> None: ...


class MemoryTransport:
    """Calls a core in this process. Its messages, which come on its thread, wait for their turn in the client's."""

    def __init__(self, port: CorePort) -> None:
        self.address = "memory"
        self._port, self._client = port, 0
        self._inbox: collections.deque[CoreMessage | Failure] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None

    is_full = False  # the core's inbox has its own limit, and refuses requests beyond it

    def open(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_closed = on_message, on_closed
        self._loop.call_soon(self._drain)

    def send(self, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._client = self._port.open(message, self.push)
        elif self._on_message is not None:
            self._port.receive(self._client, message)

    def close(self) -> None:
        self._on_message = self._on_closed = None

    def push(self, item: CoreMessage | Failure) -> None:
        """Called by the core to send a message to the client; a Failure ends the session. Thread-safe."""
        self._inbox.append(item)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the client's loop is closed already
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        assert self._loop is not None, "called in it"
        while self._inbox and self._on_message is not None and self._on_closed is not None:
            item = self._inbox.popleft()
            if isinstance(item, Failure):
                on_closed = self._on_closed
                self.close()
                on_closed(item)
                return
            try:
                self._on_message(item)
            except (KeyboardInterrupt, SystemExit):
                self._loop.call_soon(self._drain)  # whoever catches it may let the loop go on
                raise
            except BaseException as error:
                self._inbox.clear()
                self._inbox.append(_not_handled(item, error))


class ZmqTransport:
    """Connects to a core that listens at an ipc:// or tcp:// address.

    The connection is never renewed: a core that comes back is another core. ZeroMQ's event descriptors are
    edge-triggered, so the socket is read until it is empty, and checked again after every send.
    """

    def __init__(
        self,
        address: str,
        peer_timeout_s: float | None = None,
        keys: str | os.PathLike[str] | None = None,
        *,
        receives: Any = CoreMessage,
        leaving: Any = Goodbye,
        listener: str = "engine-core",
        ipv6: bool | None = None,
    ) -> None:
        """peer_timeout_s: how long the core may be silent; keys: the key file for tcp://, by default HEADRACE_KEYS.

        receives: the union of incoming messages; leaving: the message to send if this object is garbage-collected
        unclosed; listener: what listens at the address, as named in error messages; ipv6: `is_ipv6(address)`, if it is
        known, so that opening need not wait for a name server.

        Raises AddressError if clients cannot connect to such an address.
        """
        self._keys_path = key_file() if keys is None else Path(keys)
        self.address, self._peer_timeout_s = check_address(address, self._keys_path), peer_timeout_s
        self._codec: Codec[Any] = Codec(receives)
        self._leaving, self._listener, self._ipv6 = leaving, listener, ipv6
        self._unsent: collections.deque[list[zmq.Frame]] = collections.deque()
        self._unsent_bytes = 0
        self._connected = self._has_spoken = False
        self._turn_due = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_closed = on_message, on_closed
        check_files_left()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dialled = address_to_dial(self.address)
        ipv6 = self._ipv6 if dialled == self.address else None
        self._socket = new_dealer(context, dialled, self._peer_timeout_s, self._keys_path, ipv6=ipv6)
        self._context = context
        # The monitor must exist before the connection is attempted, or its failure could be missed.
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        try:
            self._socket.connect(dialled)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot connect to {self.address}: {(error.strerror or str(error)).lower()}") from error
        # The finalizer holds context and sockets. If they were in a reference cycle, the collector might finalize the
        # context first, which would wait for its sockets.
        self._forgotten = weakref.finalize(
            self, _detach, os.getpid(), self._codec.encode(self._leaving()), self._context, self._socket, self._monitor
        )
        # At interpreter exit a loop's thread may still use the sockets. Whoever runs such a thread closes them first.
        self._forgotten.atexit = False
        self._descriptors = (int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD)))
        self._loop.add_reader(self._descriptors[0], self._receive)
        self._loop.add_reader(self._descriptors[1], self._watch)
        self._loop.call_soon(self._watch)  # its edge may have come before; what is done with the other uses up none
        self._look_again()

    def send(self, message: Any) -> None:
        if self._context is None:
            return
        encoded = self._codec.encode(message)
        if len(encoded[0]) > MOST_HEADER_BYTES:
            raise InvalidRequestError(
                f"{type(message).__name__} would be a message of {len(encoded[0])} bytes; the engine takes at most "
                f"{MOST_HEADER_BYTES} at once"
            )
        frames = []
        try:
            for frame in encoded:  # in ZeroMQ's own memory, so that sending needs no more
                frames.append(zmq.Frame(frame, copy=True))
        except zmq.ZMQError as error:
            raise MemoryError(f"no memory for a message: {error}") from error
        self._unsent.append(frames)
        self._unsent_bytes += sum(map(len, frames))
        self._flush()
        self._look_again()

    @property
    def is_full(self) -> bool:
        return self._unsent_bytes > MOST_UNSENT_BYTES

    def close(self) -> None:
        if self._context is None:
            return
        context, self._context = self._context, None
        for descriptor in getattr(self, "_descriptors", ()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(descriptor)
        if hasattr(self, "_forgotten"):
            self._forgotten.detach()
        _close_sockets(context, self._socket, self._monitor, LINGER_MS if self._connected else 0)

    def _look_again(self) -> None:
        """Schedules a check of the socket in the loop's next turn: sending may have used up the descriptor's edge."""
        if not self._turn_due:
            self._turn_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, for example at interpreter exit
                self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._turn_due = False
        self._receive()

    def _flush(self) -> None:
        while self._unsent:
            try:
                send_whole(self._socket, self._unsent[0][0], self._unsent[0][1:])
            except zmq.Again:
                return
            except (CutShortError, MemoryError) as error:
                what = f"a message to the {self._listener} at {self.address} was lost: {error!r}"
                self._loop.call_soon(self._end, what, MESSAGE_LOST)  # deferred: not within the caller's send
                return
            self._unsent_bytes -= sum(map(len, self._unsent.popleft()))

    def _receive(self) -> None:
        end_s = time.monotonic() + _TURN_S
        for _ in range(_MESSAGES_PER_TURN):
            if self._context is None:
                return
            if not has_input(self._socket):
                if self._unsent:
                    self._flush()
                return
            try:
                message = self._codec.decode(receive_whole(self._socket))
            except MemoryError:  # a message is lost, so end the session: no request may wait for it
                self._end(
                    f"this client has no memory for what the {self._listener} at {self.address} sent", MESSAGE_LOST
                )
                return
            except CodecError as error:
                what = f"the {self._listener} at {self.address} sent something else than a message"
                if not self._has_spoken:
                    what = f"what listens at {self.address} is no {self._listener} of this version"
                self._end(f"{what}: {error}", "CodecError")
                return
            self._has_spoken = True
            try:
                self._on_message(message)
            except (KeyboardInterrupt, SystemExit):
                self._look_again()  # whoever catches it may let the loop go on
                raise
            except BaseException as error:  # what the message brought is lost, and no request may wait for it
                self._end_with(_not_handled(message, error))
                return
            if time.monotonic() > end_s:
                break
        self._look_again()

    def _watch(self) -> None:
        """Handles events of the connection: established, refused, lost."""
        from zmq.utils.monitor import parse_monitor_message

        while self._context is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._look_again()
                continue
            while self._context is not None and self._socket.poll(0):
                self._receive()  # messages that arrived before the end
            if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._end(
                    f"the {self._listener} at {self.address} admits no client with the keys of {self._keys_path}",
                    "KeyRefused",
                )
            elif event & HANDSHAKE_FAILED:
                others = or_keys(self.address, self._keys_path)
                self._end(
                    f"what listens at {self.address} is no {self._listener} of this version{others}", "HandshakeFailed"
                )
            elif self._connected:
                self._end(f"the {self._listener} at {self.address} is gone: the connection was lost", CONNECTION_LOST)
            elif not self._may_connect():
                self._end(
                    f"the {self._listener} at {self.address} is another user's: permission denied", "PermissionError"
                )
            else:
                self._end(
                    f"no {self._listener} listens at {self.address}",
                    "ConnectionRefused",
                    "`headrace ps` lists those of yours that run",
                )

    def _may_connect(self) -> bool:
        path = ipc_path(self.address)
        try:
            return path is None or not path.exists() or os.access(path, os.W_OK)
        except PermissionError:  # for a folder above it
            return False

    def _end(self, message: str, kind: str, hint: str = "") -> None:
        self._end_with(Failure(message=message, type=kind, phase="connection", hint=hint))

    def _end_with(self, failure: Failure) -> None:
        if self._context is not None:
            self._connected = False
            self.close()
            self._on_closed(failure)


def _not_handled(message: Any, error: BaseException) -> Failure:
    """The failure of a session of which a message could not be handled; logs it, as it is a fault of this program."""
    logger.error("a message could not be handled, which ends the session", exc_info=error)
    cause = Failure.of(error, process="client", phase="receive")
    what = f"this client failed at a {type(message).__name__} message, and ends the session: {cause.type}: "
    return msgspec.structs.replace(cause, message=what + cause.message, type=MESSAGE_LOST)


def _detach(process_id: int, goodbye: list[Any], context: Any, sock: Any, monitor: Any) -> None:
    """Finalizer of a transport that was not closed, for example because its event loop has ended."""
    if os.getpid() != process_id:
        return  # in a forked process: the connection belongs to the parent
    warnings.warn("a client of an engine-core was not closed; it is detached now", ResourceWarning, stacklevel=1)
    with contextlib.suppress(zmq.ZMQError):
        send_whole(sock, goodbye[0], goodbye[1:])
    _close_sockets(context, sock, monitor, LINGER_MS)


def _close_sockets(context: Any, sock: Any, monitor: Any, linger_ms: int) -> None:
    sock.disable_monitor()
    monitor.close(0)
    sock.close(linger_ms)
    context.term()
