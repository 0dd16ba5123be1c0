"""The nodes of an engine on several hosts, as its core sees them: how they come, what is sent to them, how they go."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from headrace import __version__
from headrace.core.options.engine_options import Options
from headrace.executor.placement.node import KEY_VARIABLE, NodeAgent, cluster_key, keep_alive
from headrace.executor.placement.node_messages import PROOF_BYTES, FromNode, JoinNode, NodeChallenge, NodeEnd, prove
from headrace.executor.placement.worker_messages import WORKER_SCHEMA_HASH
from headrace.ipc.channel import Channel, ChannelClosedError
from headrace.ipc.codec import CodecError
from headrace.ipc.failure import Failure, HeadraceError, OptionError
from headrace.ipc.messages import ChildFailed, Message
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
JOIN_S = 10.0
"""How long a host that has connected may take to say who it is."""
STOP_S = 3.0
OWN_TO_A_NODE = ("node_rank", "master_addr", "master_port")
"""Options that differ between nodes: who it is, and how it reached the core."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Node(Protocol):
    """One host as the core sees it. What it says arrives at the executor's `hear`."""

    def send(self, message: Message) -> None:
        """Does not wait and does not raise: a node that is gone is reported."""

    def close(self) -> None: ...


class LocalNode:
    """The core's own host: an agent on a thread."""

    def __init__(self, host: str, hear: Callable[[Message], None]) -> None:
        self._agent = NodeAgent(host, hear)
        self._thread = threading.Thread(target=self._agent.run, name="node 0", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._agent.take(message)

    def close(self) -> None:
        self._thread.join(STOP_S + 5.0)


class RemoteNode:
    """Another host, over a connection on which it has joined."""

    def __init__(self, number: int, channel: Channel, where: str, hear: Callable[[Message], None]) -> None:
        self._name, self._channel, self._hear = f"node {number} at {where}", channel, hear
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{name} node {number}", daemon=True)
            for name, target in (("from", self._listen), ("to", self._speak))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        """Once what was sent has left, or the node takes nothing any more."""
        self._outbox.put(None)
        self._threads[1].join(STOP_S)
        self._channel.close()

    def _speak(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # `_listen` hears of it
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive(Deadline(None)))
        except (ChannelClosedError, CodecError, OSError) as error:
            failure = Failure(message=f"{self._name} is gone: {error}", type="PeerGone", process="node")
            self._hear(ChildFailed(failure=failure))


class Lobby:
    """Listens for nodes and admits those that fit; the others are told why not, and waited for no less."""

    def __init__(
        self, options: Options, awaited: range, key: str, on_join: Callable[[int, Channel, str], None]
    ) -> None:
        """`on_join` hears of each: its number, the connection, where from. Raises OptionError if it cannot listen."""
        self._options, self._awaited, self._key, self._on_join = options, awaited, key, on_join
        self._here: set[int] = set()
        try:
            self._listener = socket.create_server((options.master_addr, options.master_port))
        except OSError as error:
            where = f"{options.master_addr}:{options.master_port}"
            raise OptionError(
                f"the other nodes cannot be waited for at {where} (master_addr, master_port): {error}"
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._welcome, name="join", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _welcome(self) -> None:
        """Takes in the other nodes, one after the other, until all are here."""
        while True:
            try:
                sock, (host, port, *_) = self._listener.accept()
            except OSError:
                return  # closed: the executor has stopped
            where = f"{host}:{port}"
            keep_alive(sock)
            channel = Channel(sock, FromNode)
            try:
                number = self._admit(channel)
            except (HeadraceError, WaitTimeoutError) as error:
                logger.warning("a node at %s was refused: %s", where, error)
                with contextlib.suppress(ChannelClosedError):
                    channel.send(NodeEnd(failure=Failure.of(error, process="engine-core", phase="join")))
                channel.close()
                continue
            self._here.add(number)
            self._on_join(number, channel, where)

    def _admit(self, channel: Channel) -> int:
        """The number of the node that has joined. Raises OptionError for one that does not fit, with both values."""
        nonce = os.urandom(PROOF_BYTES)
        channel.send(NodeChallenge(nonce=nonce))
        join = channel.receive(Deadline(JOIN_S))
        if not isinstance(join, JoinNode):
            raise OptionError(f"JoinNode is due, and {type(join).__name__} came")
        if join.schema_hash != WORKER_SCHEMA_HASH:
            raise OptionError(
                f"the engine core runs headrace {__version__} with message schema {WORKER_SCHEMA_HASH}, and the node "
                f"{join.version} with {join.schema_hash}: install the same version on all nodes"
            )
        if not hmac.compare_digest(join.proof, prove(self._key, nonce)):
            raise OptionError(f"the node's {KEY_VARIABLE} is not the engine core's; set the same one on all nodes")
        return self._check_fits(join)

    def _check_fits(self, join: JoinNode) -> int:
        for name in join.options.__struct_fields__:
            ours, theirs = getattr(self._options, name), getattr(join.options, name)
            if ours != theirs and name not in OWN_TO_A_NODE:
                raise OptionError(
                    f"{name} is {ours!r} at the engine core and {theirs!r} at the node; give all nodes the same options"
                )
        if join.node_rank not in self._awaited or join.node_rank in self._here:
            numbers = f"{self._awaited.start} to {self._awaited.stop - 1}"
            why = "is here already" if join.node_rank in self._here else f"is not one of {numbers}"
            raise OptionError(f"node_rank {join.node_rank} {why}; give each node its own")
        return join.node_rank


def check_cluster(options: Options) -> None:
    """Raises OptionError, with the numbers, for a cluster that cannot be."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    if world_size % options.nnodes:
        raise OptionError(
            f"tensor_parallel_size={options.tensor_parallel_size} times pipeline_parallel_size="
            f"{options.pipeline_parallel_size} makes {world_size} ranks, which {options.nnodes} nodes (nnodes) cannot "
            "share evenly"
        )
    if options.master_addr not in LOOPBACK and not cluster_key():
        raise OptionError(
            f"master_addr={options.master_addr} is reachable from other machines: set {KEY_VARIABLE} to the same "
            "secret on all nodes, and keep their network private, as what they say is not encrypted"
        )
