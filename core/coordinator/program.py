"""The coordinator program: the registry behind a ROUTER socket, on one thread.

On its own it runs until a signal; as a server's child it ends with the server. It saves no state: a new coordinator at
its address knows all engines within a second or two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time

import zmq

from headrace.core.coordinator.registry import Outgoing, Registry
from headrace.ipc import coordination
from headrace.ipc.codec import Codec, CodecError
from headrace.ipc.coordination import Announce, Denied, ToCoordinator, Withdraw, is_signed
from headrace.ipc.failure import Failure, HeadraceError, let_interrupts_pass
from headrace.ipc.messages import SCHEMA_HASH, ChildFailed, ParentMessage, Ready, Start
from headrace.ipc.process.child import leave_signals_to_parent
from headrace.ipc.process.log import protect_stderr, set_up_logging
from headrace.ipc.process.resources import raise_file_limit
from headrace.ipc.ranges import out_of_range
from headrace.ipc.transport.channel import Channel, ChannelClosedError, obey_parent
from headrace.ipc.transport.keys import KeyGatekeeper, key_file, read_engine_keys
from headrace.ipc.transport.sockets import (
    MOST_FRAMES,
    MOST_HEADER_BYTES,
    CutShortError,
    bind_router,
    drop_frames,
    ipc_path,
    new_ipc_address,
    receive_frames,
    send_whole,
)
from headrace.ipc.transport.strangers import Strangers
from headrace.ipc.wait import Deadline

logger = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.5
"""Longest wait for messages, and so the longest delay before `stop` takes effect."""
_GATHER_S = 0.01
"""Messages of this time are handled in one turn: waking up for each of a thousand engines costs more than reading."""
_MESSAGES_PER_TURN = 1000
_FOREIGN = "this is a coordinator, and what was sent is no message to one of its version"
_NOT_OURS = (
    "only holders of the engines' secret key announce engines to this coordinator, and a client's key file has none: "
    "start engines with the file that `headrace keys FILE` made"
)
EXIT_FAILED = 1


class Coordinator:
    """Call `run` on one thread, and `stop` from any other."""

    def __init__(self, address: str = "") -> None:
        """Binds at once. Raises AddressError and KeyFileError."""
        raise_file_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys_path = key_file() if address.startswith("tcp://") else None
        self._gatekeeper = KeyGatekeeper(self._context, keys_path) if keys_path else None
        try:
            self._secret = read_engine_keys(keys_path).engine.secret_key if keys_path else ""
            self._socket, self.address = bind_router(self._context, address or new_ipc_address("coordinator"))
        except BaseException:
            self._end_context()
            raise
        self._strangers = Strangers(self._socket)
        self._codec: Codec[ToCoordinator] = Codec(ToCoordinator, most_header_bytes=MOST_HEADER_BYTES)
        self.registry = Registry(secrets.token_hex(8))
        self._stopping = threading.Event()
        self._known: set[str] = set()
        self._num_changes = 0

    def run(self) -> None:
        """Serves until `stop`."""
        registry = self.registry
        while not self._stopping.is_set():
            wait_s = min(max(0.0, registry.due_s - time.monotonic()), _LONGEST_WAIT_S)
            if self._socket.poll(int(wait_s * 1e3) + 1):
                time.sleep(_GATHER_S)
                self._receive_all()
            self._send(registry.tick(time.monotonic()))
            self._strangers.let_go(time.monotonic())
            self._log_changes()

    def stop(self, deadline_s: float = 0.0) -> None:
        self._stopping.set()

    def close(self) -> None:
        self._strangers.close()
        self._socket.close()
        self._end_context()
        if (path := ipc_path(self.address)) is not None:
            path.unlink(missing_ok=True)

    def _end_context(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()

    def _receive_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MESSAGES_PER_TURN):
                sender, *frames = receive_frames(self._socket)
                peer = bytes(sender.bytes)
                try:
                    if len(frames) > MOST_FRAMES:
                        while drop_frames(self._socket):
                            pass
                        raise CodecError(f"a message of more than {MOST_FRAMES} frames")
                    message = self._codec.decode([frame.bytes for frame in frames])
                except CodecError as error:
                    logger.warning("a message could not be read: %s", error)
                    self._send([Outgoing((peer,), Denied(schema_hash=coordination.SCHEMA_HASH, why=_FOREIGN))])
                    continue
                if (problem := out_of_range(message)) is not None:  # what one says goes to all, in arrays of numbers
                    logger.warning("a message was refused: %s", problem)
                    self._send([Outgoing((peer,), Denied(schema_hash=coordination.SCHEMA_HASH, why=problem))])
                    continue
                if self._speaks_for_no_engine(message):
                    self._send([Outgoing((peer,), Denied(schema_hash=coordination.SCHEMA_HASH, why=_NOT_OURS))])
                    continue
                self._strangers.take(sender)
                try:
                    outgoing = self.registry.receive(peer, message, time.monotonic())
                except BaseException as error:  # no message of one peer may end the coordinator of the others
                    let_interrupts_pass(error)
                    logger.exception("a message could not be received")
                    self.registry.lost(peer)
                    continue
                self._send(outgoing)

    def _speaks_for_no_engine(self, message: ToCoordinator) -> bool:
        """Whether the message is an engine's, without the proof that its sender holds the engines' key."""
        return bool(self._secret) and isinstance(message, Announce | Withdraw) and not is_signed(message, self._secret)

    def _send(self, outgoing: list[Outgoing]) -> None:
        for each in outgoing:
            frames = self._codec.encode(each.message)
            for peer in each.peers:
                try:
                    send_whole(self._socket, peer, frames)
                except zmq.Again:
                    continue  # the peer does not read; its next Follow reports the gap
                except CutShortError as error:
                    logger.error("a peer was disconnected: %s", error)
                    self.registry.lost(peer)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    self.registry.lost(peer)

    def _log_changes(self) -> None:
        if self.registry.num_changes == self._num_changes:
            return
        self._num_changes = self.registry.num_changes
        now = set(self.registry.addresses)
        for verb, addresses in (("joined", now - self._known), ("left", self._known - now)):
            for address in sorted(addresses):
                logger.info("the engine at %s has %s; there are %d", address, verb, len(now))
        self._known = now


def run_as_child(fd: int) -> int:
    """Runs a coordinator as a server's child, which ends with the server. Returns the exit status."""
    protect_stderr()
    leave_signals_to_parent()
    set_up_logging("coordinator", "WARNING")
    channel = Channel.inherited(fd, ParentMessage)
    try:
        start = channel.receive(Deadline(10.0))
        if not isinstance(start, Start) or start.schema_hash != SCHEMA_HASH:
            raise HeadraceError("the program that started this coordinator is of another version of Headrace")
        coordinator = Coordinator(start.bind)
    except ChannelClosedError:
        return EXIT_FAILED
    except HeadraceError as error:
        with contextlib.suppress(ChannelClosedError):
            channel.send(ChildFailed(failure=Failure.of(error, process="coordinator", phase="start")))
        return EXIT_FAILED
    threading.Thread(
        target=obey_parent, args=(channel, coordinator.stop, EXIT_FAILED), name="parent", daemon=True
    ).start()
    try:
        channel.send(Ready(address=coordinator.address, startup_s={}))
        coordinator.run()
    except ChannelClosedError:
        return EXIT_FAILED
    finally:
        coordinator.close()
    return 0


if __name__ == "__main__":
    os._exit(run_as_child(int(sys.argv[1])))
