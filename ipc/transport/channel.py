"""The inherited socket between a parent and the child program it started: the handshake, and the request to stop.

    parent                         child
      Start(options, bind)   ->
                             <-   Progress(phase, seconds) *
                             <-   Ready(address)   or   ChildFailed(failure)
      Stop(deadline_s)       ->
                             <-   ChildFailed(failure), when it fails later

Each message is a 4-byte little-endian length and that many bytes. End of file means that the other side has ended.

A connection that leaves the host has a `Seal`: each message is followed by a MAC.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.ipc.codec import Codec, CodecError, Frame
from headrace.ipc.failure import HeadraceError
from headrace.ipc.messages import Stop
from headrace.ipc.wait import Deadline

_LENGTH, _NUMBER = struct.Struct("<I"), struct.Struct("<QQ")
MAX_MESSAGE_BYTES = 3 << 30
"""A worker's largest message has a step's log-probabilities over a whole vocabulary; anything longer is garbage."""
_PART_BYTES = 1 << 20
_LEAST_PART_BYTES = 1 << 16
ORPHAN_GRACE_S = 3.0
"""How long a child's orderly shutdown may take after its parent's death."""


class ChannelClosedError(HeadraceError):
    """The process at the other end has ended."""


class Seal:
    """MACs (HMAC-SHA256) of a connection's messages, by one key for each direction. Each includes the message's number:
    none can be changed, left out, repeated or sent back."""

    BYTES = 32

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_received = 0

    def sent(self, data: Frame) -> bytes:
        """The MAC that follows the next message."""
        self._num_sent += 1
        return self._mac(self._sends, self._num_sent, data)

    def check(self, data: bytes, mac: bytes) -> None:
        """Raises CodecError unless the next message of the other side is this one."""
        self._num_received += 1
        if not hmac.compare_digest(mac, self._mac(self._receives, self._num_received, data)):
            raise CodecError("a message was changed on its way, or is not from the process that proved its key")

    @staticmethod
    def _mac(key: bytes, number: int, data: Frame) -> bytes:
        mac = hmac.new(key, _NUMBER.pack(number, len(data)), "sha256")
        mac.update(data)
        return mac.digest()


_AWAITED = "a message from the other process"


class Channel:
    """One end of the channel. `receives` is the union of its incoming messages. Any thread may send; one receives."""

    def __init__(
        self, sock: socket.socket, receives: Any, seal: Seal | None = None, *, reads_ahead: bool = True
    ) -> None:
        """reads_ahead: whether `receive` may take the beginning of later messages out of the socket. It must not where
        others wait for the socket, or receive from it after a fork."""
        self._socket, self._seal = sock, seal
        self._least_part_bytes = _LEAST_PART_BYTES if reads_ahead else 0
        self._sending = threading.Lock()
        self._sends: Codec[Any] = Codec(receives)  # encoding is the same for every union
        self._receives: Codec[Any] = Codec(receives)
        self._received = bytearray()  # what has come of messages that `receive` has not returned yet
        self._can_send, self._can_receive = select.poll(), select.poll()
        self._can_send.register(sock, select.POLLOUT)
        self._can_receive.register(sock, select.POLLIN)

    @classmethod
    def pair(cls, receives: Any) -> tuple[Channel, socket.socket]:
        """This end, and the child's socket, which is to be passed on to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours, receives), theirs

    @classmethod
    def inherited(cls, fd: int, receives: Any, *, reads_ahead: bool = True) -> Channel:
        return cls(socket.socket(fileno=fd), receives, reads_ahead=reads_ahead)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, deadline: Deadline | None = None) -> None:
        """Raises ChannelClosedError if the other process is gone, WaitTimeoutError if it does not receive in time.

        After WaitTimeoutError the channel is unusable, as half a message may have been sent.
        """
        with self._sending:
            (header,) = self._sends.encode(message)
            mac = b"" if self._seal is None else self._seal.sent(header)
            parts = [_LENGTH.pack(len(header)), header, mac]
            if len(header) < _PART_BYTES:
                parts = [b"".join(parts)]  # several would wake up the receiver several times
            for part in parts:
                data = memoryview(part)
                while data:
                    try:
                        data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                    except BlockingIOError:
                        (deadline or Deadline(None)).poll(self._can_send, "taking a message from the channel")
                    except OSError as error:
                        raise ChannelClosedError(f"the other process is gone ({error})") from error

    def receive(self, deadline: Deadline) -> Any:
        """Raises ChannelClosedError at end of file, WaitTimeoutError at the deadline, CodecError for garbage or
        a message without the right MAC.

        If the deadline passes within a message, the next call continues with the part received so far.
        """
        received, ends_at, mac_at = self._received, 0, 0
        while not ends_at or len(received) < ends_at:
            if not ends_at and len(received) >= _LENGTH.size:
                length = _LENGTH.unpack_from(received)[0]
                if length > MAX_MESSAGE_BYTES:
                    raise CodecError(f"a channel message of {length} bytes; at most {MAX_MESSAGE_BYTES} are taken")
                mac_at = _LENGTH.size + length
                ends_at = mac_at + (Seal.BYTES if self._seal else 0)
                continue
            num_missing = (ends_at or _LENGTH.size) - len(received)  # what follows the message may come along
            try:
                part = self._socket.recv(
                    min(max(num_missing, self._least_part_bytes), _PART_BYTES), socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                deadline.poll(self._can_receive, _AWAITED)
                continue
            except OSError as error:
                raise ChannelClosedError(f"the other process is gone ({error})") from error
            if not part:
                raise ChannelClosedError("the other process closed its end")
            received += part
        with memoryview(received) as view:
            data, mac = bytes(view[_LENGTH.size : mac_at]), bytes(view[mac_at:ends_at])
        del received[:ends_at]
        if self._seal is not None:
            self._seal.check(data, mac)
        return self._receives.decode([data])

    def wait(self, deadline: Deadline) -> None:
        """Waits until a message begins to arrive, or the end of file. Raises WaitTimeoutError."""
        deadline.poll(self._can_receive, _AWAITED)

    def looks_for(self, seconds: float) -> bool:
        """`wait` without sleeping. Whether a message, or the end of file, has come."""
        look, end_s = self._can_receive.poll, time.perf_counter() + seconds
        while not look(0):
            if time.perf_counter() > end_s:
                return False
        return True

    def close(self) -> None:
        self._socket.close()


def obey_parent(
    channel: Channel,
    stop: Callable[[float], object],
    orphan_status: int,
    on_message: Callable[[Any], object] = lambda message: None,
) -> None:
    """Main function of a child's thread: calls `stop` with the deadline_s of each Stop, `on_message` with the others.

    When the parent dies it calls `stop` with 0, and exits with `orphan_status` if an orderly shutdown takes longer than
    ORPHAN_GRACE_S.
    """
    try:
        while True:
            message = channel.receive(Deadline(None))
            if isinstance(message, Stop):
                stop(message.deadline_s)
            else:
                on_message(message)
    except (ChannelClosedError, CodecError):
        timer = threading.Timer(ORPHAN_GRACE_S, os._exit, args=(orphan_status,))
        timer.daemon = True
        timer.start()
        stop(0.0)
