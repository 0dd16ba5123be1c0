"""The port for clients in other processes: a ROUTER socket, read by the I/O thread and written mostly by the loop's.

    loop thread                          I/O thread                              clients
       inbox  <-------------------  sessions <--- decode <--- ROUTER  <------------  DEALER
       send() ---> encode ------------------------------> ROUTER  ------------>  DEALER

The loop's thread sends a step's outputs itself: waking another thread would take longer, and that thread would then
compete for the interpreter's lock and a core with the next step. A lock guards the socket, which both threads use.

The loop never blocks on a client: the queue to each is bounded, and a client that does not read is dismissed. Its
requests end at once; it gets `Dismissed` as soon as its queue has room again, and then closes its connection.

A client that was found gone or was dismissed may have sent messages before it knew. These are dropped. The port
remembers such clients, so that it does not answer these messages with a refusal as sent before Hello.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Sequence

import zmq

from headrace.core.engine.sessions import Broadcaster, Sessions
from headrace.ipc.codec import Codec, CodecError, Frame
from headrace.ipc.failure import Failure, let_interrupts_pass
from headrace.ipc.messages import ClientMessage, CoreMessage, Goodbye, Hello, Load
from headrace.ipc.process.resources import check_files_left
from headrace.ipc.transport.engine_records import OwnRecord
from headrace.ipc.transport.keys import KeyGatekeeper, is_own_file, key_file
from headrace.ipc.transport.sockets import (
    MOST_FRAMES,
    MOST_HEADER_BYTES,
    CutShortError,
    bind_router,
    drop_frames,
    has_input,
    ipc_path,
    receive_frames,
    send_whole,
    this_kernel,
)
from headrace.ipc.transport.strangers import Strangers

logger = logging.getLogger(__name__)
PROBE_BUSY_S = 1.0
"""Interval at which clients with requests get the load; sending it also shows whether a client is still alive."""
PROBE_IDLE_S = 30.0
REFUSAL_LOG_EVERY_S = 1.0
MAX_BURST_MESSAGES, BURST_PERIOD_S = 8, 0.001
"""Messages received at once, and the pause after them, while requests run and the loop is behind.

The I/O thread then uses a fifth of the interpreter's time. Without a pause, thousands of messages used two thirds of it
and doubled the time of each step. Even so, more messages arrive than the loop handles.
"""
FORMER_CLIENTS = 4096
"""How many identities of former clients are remembered, to tell their late messages from those of unknown senders."""
COUNTED_BYTES = 4096
"""Size from which messages count towards `unread_bytes`; for smaller ones the number of messages is limit enough."""
DONE_WITHIN_S = 0.25
"""How long the port waits before it dismisses a client that is over `unread_bytes`: a thread of pyzmq's reports which
messages ZeroMQ is done with, and on a busy machine that thread is late. Each client costs this wait at most once."""
_SENT, _FULL, _GONE = "sent", "full", "gone"


class _Unread:
    """Large messages on their way to one client. ZeroMQ sends them from our memory and reports when it is done."""

    def __init__(self) -> None:
        self._sent: collections.deque[tuple[int, list[zmq.MessageTracker]]] = collections.deque()
        self._bytes = 0

    def send(self, sock: zmq.Socket[bytes], identity: bytes, frames: Sequence[Frame], most_bytes: int) -> bool:
        """Returns False, and sends nothing, if more than `most_bytes` would wait. A single message may be larger."""
        self._drop_done(0.0)
        size_bytes = sum(map(len, frames))
        if self._bytes and self._bytes + size_bytes > most_bytes:
            self._drop_done(DONE_WITHIN_S)
            if self._bytes and self._bytes + size_bytes > most_bytes:
                return False
        try:
            counted = [zmq.Frame(frame, track=True, copy=False, copy_threshold=0) for frame in frames]
        except Exception:  # such as a lack of memory
            send_whole(sock, identity, frames)
            return True
        send_whole(sock, identity, counted)
        self._bytes += size_bytes
        self._sent.append((size_bytes, [frame.tracker for frame in counted]))
        return True

    def _drop_done(self, within_s: float) -> None:
        """Stops counting the messages that ZeroMQ is done with, or reports to be within this time."""
        end_s = time.monotonic() + within_s
        with contextlib.suppress(zmq.NotDone):
            while self._sent:
                for tracker in self._sent[0][1]:
                    if not tracker.done:
                        tracker.wait(max(0.0, end_s - time.monotonic()))
                self._bytes -= self._sent.popleft()[0]


class ZmqPort(Broadcaster):
    """The loop's thread calls `send`, `set_load` and `close`; everything else runs on the port's I/O thread.

    ZeroMQ's file descriptor signals a message only once, and any use of the socket may consume the signal. So after
    each send the loop's thread checks for messages, and wakes the I/O thread if there are any.
    """

    def __init__(
        self,
        address: str,
        *,
        peer_timeout_s: float | None = None,
        unread_messages: int | None = None,
        unread_bytes: int = 1 << 30,
    ) -> None:
        """Binds at once, so that the address is known; `serve` starts answering. Raises AddressError, KeyFileError.

        peer_timeout_s: how long a client may be silent. unread_messages, unread_bytes: how many messages, and how many
        bytes of large ones, a client may leave unread before it is dismissed.
        """
        super().__init__()
        check_files_left()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys_path = key_file() if address.startswith("tcp://") else None
        self._gatekeeper = KeyGatekeeper(self._context, keys_path) if keys_path else None
        try:
            self._socket, self.address = bind_router(
                self._context, address, timeout_s=peer_timeout_s, unread_messages=unread_messages
            )
        except BaseException:
            self._end_context()
            raise
        self._strangers = Strangers(self._socket)
        self._record = OwnRecord(
            self.address, this_kernel(), keys_path if keys_path and is_own_file(keys_path) else None
        )
        self._socket_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._codec: Codec[ClientMessage] = Codec(ClientMessage, most_header_bytes=MOST_HEADER_BYTES)
        self._loop_codec: Codec[ClientMessage] = Codec(ClientMessage)
        self._client_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._load = Load(num_running=0, num_waiting=0)
        self._busy_clients: frozenset[int] = frozenset()
        self._dismissed: set[bytes] = set()  # identities that must still get Dismissed
        self._most_unread_bytes = unread_bytes
        self._unread: dict[bytes, _Unread] = {}  # by identity; guarded by the socket's lock
        self._former: dict[bytes, None] = {}  # identities of former clients, oldest first
        self._num_refused, self._next_refusal_log_s = 0, 0.0
        self._thread: threading.Thread | None = None

    def serve(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)
        self._thread.start()
        self._record.set_ready()

    def send(self, client: int, message: CoreMessage) -> None:
        self._send(client, self._loop_codec.encode(message))
        with self._socket_lock:
            wakes = has_input(self._socket)  # sending may have used up the descriptor's signal
        if wakes:
            self._wake()

    def set_load(self, load: Load, busy_clients: frozenset[int]) -> None:
        """Sets the load that clients with requests (`busy_clients`) get about once a second."""
        began = bool(busy_clients) and not self._busy_clients
        self._load, self._busy_clients = load, busy_clients
        if began:
            self._wake()

    @property
    def clients(self) -> list[int]:
        return list(self._identity_of)

    def close(self) -> None:
        """Closes the socket, which still delivers messages already sent, and removes its file."""
        if self._thread is not None:
            self._closing = True
            self._wake()
            self._thread.join(5.0)
            self._thread = None
        self._record.remove()
        self._strangers.close()
        self._socket.close()
        self._end_context()
        with contextlib.suppress(OSError):
            os.close(self._wake_fd)
        if (path := ipc_path(self.address)) is not None:
            path.unlink(missing_ok=True)

    def _end_context(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            self._serve_clients()
        except BaseException as error:  # a core that receives no messages is of no use
            self._sessions.port_failed(Failure.of(error, process="engine-core", phase="receive"))
            raise

    def _serve_clients(self) -> None:
        poll = select.poll()
        for descriptor in (int(self._socket.getsockopt(zmq.FD)), self._strangers.descriptor, self._wake_fd):
            poll.register(descriptor, select.POLLIN)
        next_busy_probe = next_idle_probe = time.monotonic()
        while not self._closing:
            has_all = self._receive_some()  # before the wait: the descriptor's signal may already be consumed
            stranger_s = self._strangers.let_go(time.monotonic())
            ready: list[tuple[int, int]] = []
            if has_all and not self._should_yield:
                ready = poll.poll(self._wait_ms(stranger_s))
            else:
                time.sleep(BURST_PERIOD_S)
            if (self._wake_fd, select.POLLIN) in ready:
                os.eventfd_read(self._wake_fd)
            now = time.monotonic()
            if self._dismissed:
                self._send_dismissals()
            if now >= next_idle_probe:
                self._probe(self.clients)
                next_idle_probe, next_busy_probe = now + PROBE_IDLE_S, now + PROBE_BUSY_S
            elif now >= next_busy_probe:
                self._probe(list(self._busy_clients))
                next_busy_probe = now + PROBE_BUSY_S

    def _wait_ms(self, stranger_s: float | None) -> float | None:
        """stranger_s: the seconds until a stranger's time is over."""
        if self._busy_clients or self._dismissed:
            return PROBE_BUSY_S * 1e3
        waits_s = [stranger_s] if stranger_s is not None else []
        if self._identity_of:
            waits_s.append(PROBE_IDLE_S)
        return min(waits_s) * 1e3 if waits_s else None

    @property
    def _should_yield(self) -> bool:
        """Requests run and the loop is behind with its messages, so this thread leaves the interpreter to the loop."""
        return bool(self._busy_clients) and self._sessions.is_behind

    def _receive_some(self) -> bool:
        """Receives the messages that have come. False if there may be more."""
        count = 0
        while count < MAX_BURST_MESSAGES or not self._should_yield:
            count += 1
            with self._socket_lock:
                if not has_input(self._socket):
                    return True
                identity, *frames = receive_frames(self._socket)
            sender = bytes(identity.bytes)
            try:
                if len(frames) > MOST_FRAMES:
                    self._drop_frames()
                    raise CodecError(f"a message of more than {MOST_FRAMES} frames")
                is_stranger = sender not in self._client_of
                self._receive(sender, [frame.buffer for frame in frames])
                if is_stranger and sender in self._client_of:
                    self._strangers.take(identity)
            except CodecError as error:
                self._take_undecodable(sender, frames[0].buffer if frames else b"", str(error))
            except BaseException as error:  # no message of one client may end the engine of the others
                let_interrupts_pass(error)
                logger.exception("a message could not be received")
                self._dismiss(sender, f"a message of this client could not be received: {type(error).__name__}")
        return False

    def _drop_frames(self) -> None:
        """Drops the remaining frames of the message being received; the loop may send in between."""
        has_more = True
        while has_more:
            with self._socket_lock:
                has_more = drop_frames(self._socket)

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        """Handles one message. Raises CodecError if the frames are no valid message."""
        client = self._client_of.get(identity)
        message = self._codec.decode(frames)
        if isinstance(message, Hello) and client is None:
            self._greet(identity, message)
        elif client is None:
            if identity not in self._former and not isinstance(message, Goodbye):
                self._refuse(identity, f"{type(message).__name__} before Hello")
        else:
            reply = self._sessions.receive(client, message)
            if isinstance(message, Goodbye):
                self._forget(client)
            elif reply is not None:
                self._send(client, self._codec.encode(reply))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        with self._greeting:
            answer = self._sessions.greet(hello)
            if not isinstance(answer, tuple):
                self._send_to(identity, self._codec.encode(answer))
                return
            client, welcome = answer
            if self._send_to(identity, self._codec.encode(welcome)):
                self._client_of[identity], self._identity_of[client] = client, identity
            draining = self._draining
        if draining is not None:
            self._send(client, self._codec.encode(draining))

    def _dismiss(self, identity: bytes, why: str) -> None:
        """Dismisses a client of which a message was lost, since it would wait for the answer."""
        client = self._client_of.get(identity)
        if client is None:
            self._refuse(identity, why)
            return
        self._send(client, self._codec.encode(self._sessions.dismissal(why)))
        if client in self._identity_of:
            self._forget(client)
            self._sessions.gone(client)

    def _take_undecodable(self, identity: bytes, header: Frame, why: str) -> None:
        client = self._client_of.get(identity)
        if client is None or len(header) > MOST_HEADER_BYTES:
            self._refuse(identity, why)
            return
        self._note_refusal(why)
        answer = self._sessions.undecodable(client, header, why)
        if answer is not None:
            self._send(client, self._codec.encode(answer))

    def _refuse(self, identity: bytes, why: str) -> None:
        self._note_refusal(why)
        self._send_to(identity, self._codec.encode(self._sessions.refuse(why)))

    def _note_refusal(self, why: str) -> None:
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s >= self._next_refusal_log_s:  # a client that sends only invalid messages must not fill the log
            self._next_refusal_log_s = now_s + REFUSAL_LOG_EVERY_S
            logger.warning("refused a message (the %dth): %s", self._num_refused, why)

    def _send_dismissals(self) -> None:
        why = "this client did not read its answers; its requests were ended, and it is served no more"
        frames = self._codec.encode(self._sessions.dismissal(why))
        for identity in list(self._dismissed):
            if self._try_to_send(identity, frames) != _FULL:
                self._dismissed.discard(identity)

    def _probe(self, clients: list[int]) -> None:
        load = self._codec.encode(self._load)
        for client in clients:
            self._send(client, load)

    # --- on either thread ---------------------------------------------------------------------------------------

    def _send(self, client: int, frames: list[Frame]) -> None:
        identity = self._identity_of.get(client)
        if identity is not None and not self._send_to(identity, frames):
            self._forget(client)
            self._sessions.gone(client)

    def _send_to(self, identity: bytes, frames: list[Frame]) -> bool:
        """False if the peer is gone, or if its queue is full because it does not read; then it is dismissed."""
        outcome = self._try_to_send(identity, frames)
        if outcome == _FULL and identity in self._client_of:
            logger.warning("a client does not read its messages and is disconnected")
            self._dismissed.add(identity)
            self._wake()
        return outcome == _SENT

    def _try_to_send(self, identity: bytes, frames: list[Frame]) -> str:
        """Returns _SENT, _FULL or _GONE."""
        try:
            with self._socket_lock:
                if sum(map(len, frames)) < COUNTED_BYTES or identity not in self._client_of:
                    send_whole(self._socket, identity, frames)
                elif not self._unread.setdefault(identity, _Unread()).send(
                    self._socket, identity, frames, self._most_unread_bytes
                ):
                    return _FULL
        except zmq.Again:
            return _FULL
        except CutShortError as error:  # the client detects the cut message and closes its connection
            logger.error("a client was disconnected: %s", error)
            return _GONE
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return _GONE
        return _SENT

    def _forget(self, client: int) -> None:
        if (identity := self._identity_of.pop(client, None)) is not None:
            self._client_of.pop(identity, None)
            with self._socket_lock:
                self._unread.pop(identity, None)
            self._former[identity] = None
            if len(self._former) > FORMER_CLIENTS:
                del self._former[next(iter(self._former))]
