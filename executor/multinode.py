"""The executor of a world on several hosts: an agent on each (executor/node.py) starts and drives that host's workers.

    core's loop          this host's agent, on a thread  -->  MultiprocExecutor of its ranks
      submit, collect -->
                         TCP  -->  agent of node 1       -->  MultiprocExecutor of its ranks
                              ...

The ranks themselves talk gloo, across all hosts. Every node is given every step; the one with the rank whose results
count sends them back. The first failure anywhere ends all nodes, and is what the user sees.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from headrace import __version__
from headrace.core.options import Options
from headrace.core.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.base import Executor, Report
from headrace.executor.multiproc import SHARES, check_equal
from headrace.executor.node import KEY_VARIABLE, NodeAgent, cluster_key, keep_alive
from headrace.executor.node_messages import (
    PROOF_BYTES,
    FromNode,
    JoinNode,
    LoadNode,
    NodeAnswered,
    NodeChallenge,
    NodeCommand,
    NodeDescribed,
    NodeEnd,
    NodeResult,
    NodeStep,
    RunNode,
    prove,
)
from headrace.executor.step_codec import StepCodec
from headrace.executor.worker_messages import (
    WORKER_SCHEMA_HASH,
    AllocateCache,
    Allocated,
    Loaded,
    MakeTokenizer,
    TokenizerMade,
)
from headrace.ipc.channel import Channel, ChannelClosedError
from headrace.ipc.codec import CodecError
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure, HeadraceError, OptionError
from headrace.ipc.messages import ChildFailed, Message, Progress, Stop, TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
JOIN_S = 10.0
"""How long a host that has connected may take to say who it is."""
STOP_S = 3.0
GRACE_S = 5.0
"""By how much the core's patience with a step outlasts the nodes' own, which know which rank hangs."""
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


class MultiNodeExecutor(Executor):
    """Owns the nodes. Called from the core's loop thread; `hear` from the nodes' threads."""

    async_by_default = True

    def __init__(self, options: Options) -> None:
        """Listens for the other hosts, and starts nothing yet. Raises OptionError, with the numbers."""
        check_cluster(options)
        self._open(options, options.nnodes, cluster_key())

    def _open(self, options: Options, num_nodes: int, key: str) -> None:
        """Listens for nodes that know the key."""
        self._options, self._num_nodes, self._key = options, num_nodes, key
        self._ranks_per_node = options.tensor_parallel_size * options.pipeline_parallel_size // num_nodes
        self.num_stages = options.pipeline_parallel_size
        self.max_steps_in_flight = options.pipeline_parallel_size + 1
        self._plans, self._answers = StepCodec(StepPlan), StepCodec(StepResult)
        self._results: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._heard: list[list[Message]] = [[] for _ in range(self._num_nodes)]
        self._nodes: dict[int, Node] = {}
        self._awaited = range(1, num_nodes)
        self._failure: Failure | None = None
        self._on_failure: Callable[[Failure], None] = lambda failure: None
        self._is_serving = self._is_stopping = False
        self._store: tuple[str, int] | None = None
        try:
            self._listener = socket.create_server((options.master_addr, options.master_port))
        except OSError as error:
            where = f"{options.master_addr}:{options.master_port}"
            raise OptionError(
                f"the other nodes cannot be waited for at {where} (master_addr, master_port): {error}"
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """Where nodes join."""
        threading.Thread(target=self._welcome, name="join", daemon=True).start()

    def describe(self, report: Report) -> ModelDescription:
        report("wait for nodes")
        self._start_nodes()
        self._wait_for_nodes()
        report("find model")
        for number, node in self._nodes.items():
            first = number * self._ranks_per_node
            node.send(RunNode(options=self._options, first_rank=first, num_ranks=self._ranks_per_node))
        described = self._gather(NodeDescribed, report)
        found = [message.description for message in described]
        check_equal(found, "node")
        self._store = next(message.store for message in described if message.store is not None)
        # Each host has a memory of its own; blocks are as many as fit where a token takes most.
        return msgspec.structs.replace(found[0], **{name: max(getattr(d, name) for d in found) for name in SHARES})

    def tokenizer(self) -> TokenizerBundle | None:
        if self._options.skip_tokenizer_init:
            return None
        self._nodes[0].send(MakeTokenizer())
        (made,) = self._gather(TokenizerMade, nodes=range(1))
        return made.bundle

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        assert self._store is not None, "describe comes before load"
        self._send(LoadNode(plan=plan, store=self._store))
        readings = [message.reading for message in self._gather(Loaded, report)]
        scarcest = min(readings, key=lambda reading: reading.available_bytes)
        most = max(reading.activation_bytes for reading in readings)
        return msgspec.structs.replace(scarcest, activation_bytes=most)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._send(AllocateCache(num_blocks=num_blocks, max_model_len=max_model_len))
        self._gather(Allocated)
        self._is_serving = True

    def submit(self, plan: StepPlan) -> None:
        """Hands the step to every node and waits for none."""
        self._raise_failure()
        self._send(NodeStep(data=self._plans.encode(plan)))

    def collect(self) -> StepResult:
        timeout_s = self._options.step_timeout + GRACE_S
        try:
            data = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._fail(Failure(message=f"no node gave a step's result within {timeout_s:g} s", type="Timeout"))
            data = None
        self._raise_failure()
        assert data is not None, "only a failure is told by None"
        return self._answers.decode(data)

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        self._raise_failure()
        self._send(NodeCommand(command=command))
        answered = self._gather(NodeAnswered)
        for message in answered:
            if message.failure is not None:
                raise HeadraceError(failure=message.failure)
        return tuple(answer for message in answered for answer in message.answers)

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        self._on_failure = on_failure
        if self._failure is not None:
            on_failure(self._failure)

    def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._listener.close()
        if self._failure is None:
            self._send(Stop(deadline_s=STOP_S))
        for node in self._nodes.values():
            node.close()

    # --- what the nodes' threads do -----------------------------------------------------------------------------

    def hear(self, number: int, message: Message) -> None:
        """What a node said."""
        if isinstance(message, NodeResult):
            self._results.put(message.data)
        elif isinstance(message, ChildFailed):
            self._fail(message.failure)
        else:
            with self._changed:
                self._heard[number].append(message)
                self._changed.notify_all()

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self._failure is not None or self._is_stopping:
                return
            self._failure = failure
            self._changed.notify_all()
        logger.error("%s", failure.message)
        self._send(NodeEnd(failure=failure))
        self._results.put(None)
        self._on_failure(failure)

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
            with self._changed:
                self._nodes[number] = RemoteNode(number, channel, where, lambda m, number=number: self.hear(number, m))  # type: ignore[misc]
                self._changed.notify_all()

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
        if join.node_rank not in self._awaited or join.node_rank in self._nodes:
            numbers = f"{self._awaited.start} to {self._num_nodes - 1}"
            why = "is here already" if join.node_rank in self._nodes else f"is not one of {numbers}"
            raise OptionError(f"node_rank {join.node_rank} {why}; give each node its own")
        return join.node_rank

    # --- waiting ------------------------------------------------------------------------------------------------

    def _start_nodes(self) -> None:
        """Those that do not come by themselves: here, this very host."""
        with self._changed:
            self._nodes[0] = LocalNode(self._options.master_addr, lambda message: self.hear(0, message))

    def _wait_for_nodes(self) -> None:
        timeout_s = self._options.node_join_timeout
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) == self._num_nodes or self._failure, timeout_s)
            missing = [str(number) for number in range(self._num_nodes) if number not in self._nodes]
        self._raise_failure()
        if missing:
            host, port = self.address
            raise EngineStartError(
                f"{self._num_nodes - len(missing)} of {self._num_nodes} nodes are here after {timeout_s:g} s "
                f"(node_join_timeout), and node_rank {', '.join(missing)} is missing; start it with the same options "
                f"and --node-rank {missing[0]} --master-addr {host} --master-port {port}"
            )

    def _gather(self, kind: type[M], report: Report | None = None, nodes: range | None = None) -> list[M]:
        """The next message of this kind from each node. `report` is told the first one's phases meanwhile."""
        found: dict[int, M] = {}
        wanted = nodes or range(self._num_nodes)
        while len(found) < len(wanted):
            phases = []
            with self._changed:
                self._changed.wait_for(lambda: self._failure or self._any_heard(kind, wanted, found, report))
                for number in wanted:
                    for message in list(self._heard[number]):
                        if isinstance(message, Progress) and report:
                            self._heard[number].remove(message)
                            phases += [message.phase] if number == 0 else []
                        elif isinstance(message, kind) and number not in found:
                            self._heard[number].remove(message)
                            found[number] = message
            self._raise_failure()
            for phase in phases:
                assert report is not None, "phases are for it"
                report(phase)
        return [found[number] for number in wanted]

    def _any_heard(self, kind: type[Message], nodes: range, found: dict[int, M], report: Report | None) -> bool:
        return any(
            (isinstance(message, kind) and number not in found)
            or (report is not None and isinstance(message, Progress))
            for number in nodes
            for message in self._heard[number]
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise (EngineDeadError if self._is_serving else EngineStartError)(failure=self._failure)

    def _send(self, message: Message) -> None:
        for node in self._nodes.values():
            node.send(message)


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
