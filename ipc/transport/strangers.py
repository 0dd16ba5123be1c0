"""Lets go of whoever connects to a ROUTER and does not say what it wants.

Where no keys are asked for, ZeroMQ's handshake proves nothing: anybody completes it, and keeps a file descriptor for as
long as it answers heartbeats. So a connection is a stranger's until its first message has been taken:

    accepted ---> stranger ---> `take` has its message: known, and no longer looked at
                     |--------> INTRODUCED_WITHIN_S is over, or `most_strangers` came after it: shut down

ZeroMQ cannot close one connection of a ROUTER, but tells of its file descriptors. A number may be another file's by the
time that it is used, so the socket's inode decides.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

import zmq

from headrace.ipc.process.resources import file_limit

INTRODUCED_WITHIN_S = 10.0
_EVENT = struct.Struct("=hi")  # event, and its value: here a file descriptor
_SRCFD = 2  # ZMQ_SRCFD, which pyzmq does not name in every version


def most_strangers() -> int:
    """Enough for a large fleet that connects at once, and never most of the files that this process may open."""
    return min(2048, file_limit() // 2)


class Strangers:
    """Of one ROUTER, on the thread that reads it. Ask for it right after the socket is bound."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._most = most_strangers()
        self._accepted: dict[int, tuple[int, float]] = {}  # by descriptor, the oldest first: inode, end of its time

    @property
    def descriptor(self) -> int:
        """Readable when connections come or go; edge-triggered, so call `let_go` before each wait."""
        return int(self._monitor.getsockopt(zmq.FD))

    def take(self, frame: zmq.Frame) -> None:
        """The sender of this frame has introduced itself."""
        self._read_events()
        self._accepted.pop(int(frame.get(_SRCFD)), None)

    def let_go(self, now_s: float) -> float | None:
        """Shuts down the connections whose time is over. Returns the seconds until the next one's is."""
        self._read_events()
        while self._accepted:
            descriptor, (inode, ends_s) = next(iter(self._accepted.items()))
            if ends_s > now_s and len(self._accepted) <= self._most:
                return ends_s - now_s
            del self._accepted[descriptor]
            _shut_down(descriptor, inode)
        return None

    def close(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                self._accepted.pop(descriptor, None)
                if event == zmq.EVENT_ACCEPTED:
                    with contextlib.suppress(OSError):  # it has gone already
                        inode = os.fstat(descriptor).st_ino
                        self._accepted[descriptor] = inode, time.monotonic() + INTRODUCED_WITHIN_S


def _shut_down(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
