"""The executor of a world on several hosts: an agent on each host (node_agent.py) starts and drives the workers there.

    core's loop          this host's agent, on a thread  -->  MultiprocExecutor of its ranks
      submit, collect -->
                         TCP  -->  agent of node 1       -->  MultiprocExecutor of its ranks
                              ...

The ranks communicate through gloo, across all hosts. Every node gets every step; the node of the rank that replies
sends the results back. The first failure anywhere ends all nodes, and is the one that the user sees.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.core.options.values import with_secrets
from headrace.executor.placement.adapter_orders import agreed
from headrace.executor.placement.base import Executor
from headrace.executor.placement.cluster_proof import PeerClaims, check_same_version, cluster_key
from headrace.executor.placement.join_port import JoinPort
from headrace.executor.placement.multiproc import check_equal, merged
from headrace.executor.placement.node_agent import NodeAgent, keep_alive
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.placement.worker_group import Replies, command_limit_s
from headrace.executor.placement.worker_messages import (
    AllocateCache,
    Allocated,
    FillSlot,
    FromNode,
    JoinNode,
    Loaded,
    LoadNode,
    MakeTokenizer,
    NodeAnswered,
    NodeCommand,
    NodeDescribed,
    NodeEnd,
    NodeLeaving,
    NodeResult,
    NodeStep,
    RunNode,
    SlotFilled,
    TokenizerMade,
)
from headrace.executor.rank import Report
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.codec import CodecError
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import (
    EngineDeadError,
    EngineStartError,
    Failure,
    HeadraceError,
    OptionError,
    let_interrupts_pass,
)
from headrace.ipc.messages import ChildFailed, Message, Stop, TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.transport.channel import Channel, ChannelClosedError, Seal
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
GRACE_S = 5.0
"""The core waits this much longer than the nodes for a step or a start, since they know which rank hangs."""
JOIN_S = 10.0
"""How long a host that has proved its key may take to send JoinNode."""
STOP_S = 3.0
OWN_TO_A_NODE = ("node_rank", "master_addr", "master_port")
"""Options that may differ between nodes."""


class MultiNodeExecutor(Executor):
    """Owns the nodes. Called from the core's loop thread, except `hear`, which the nodes' threads call."""

    async_by_default = True

    def __init__(self, options: Options) -> None:
        """Listens for the other hosts; starts no workers yet. Raises OptionError, with the numbers."""
        check_cluster(options)
        self._open(options, options.nnodes, range(1, options.nnodes), cluster_key(options))

    def _open(self, options: Options, num_nodes: int, awaited: range, key: str) -> None:
        """Listens for nodes with the `awaited` numbers that know the key."""
        self._options, self._num_nodes = options, num_nodes
        self._ranks_per_node = options.tensor_parallel_size * options.pipeline_parallel_size // num_nodes
        self.num_stages = options.pipeline_parallel_size
        self.max_steps_in_flight = options.pipeline_parallel_size + 1
        self._plans, self._answers = StepCodec(StepPlan), StepCodec(StepResult)
        self._results: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said = Replies(num_nodes, error=self._error, late=self._late, lagging=self._lagging)
        self._changed = self._said.changed
        self._start_ends = Deadline(None)
        self._nodes: dict[int, Node] = {}
        self._on_failure: Callable[[Failure], None] = lambda failure: None
        self._on_leaving: Callable[[str], None] = lambda name: None
        self._is_serving = self._is_stopping = False
        self._store: tuple[str, int] | None = None
        self._joining = NodeListener(options, awaited, key, self._add)
        self.address = self._joining.address
        """Where nodes join."""

    def describe(self, report: Report) -> ModelDescription:
        report("wait for nodes")
        self._start_nodes()
        self._wait_for_nodes()
        self._start_ends = Deadline(self._options.startup_timeout + GRACE_S)
        report("find model")
        for number, node in self._nodes.items():
            node.send(RunNode(first_rank=number * self._ranks_per_node, num_ranks=self._ranks_per_node))
        described = self._said.gather(NodeDescribed, report=report, deadline=self._start_ends)
        found = [message.description for message in described]
        check_equal(found, "node")
        self._store = next(message.store for message in described if message.store is not None)
        self.has_own_memory = described[0].has_own_memory
        # Each host has its own memory, so the rank with the largest share of a token determines the number of blocks.
        return merged(found, max)

    def tokenizer(self) -> TokenizerBundle | None:
        if self._options.skip_tokenizer_init:
            return None
        self._nodes[0].send(MakeTokenizer())
        (made,) = self._said.gather(TokenizerMade, of=range(1), deadline=self._start_ends)
        return made.bundle

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        assert self._store is not None, "describe comes before load"
        self._send(LoadNode(plan=plan, store=self._store, turns=secrets.token_hex(8)))
        loaded = self._said.gather(Loaded, report=report, deadline=self._start_ends)
        readings = [message.reading for message in loaded]
        if self.has_own_memory:
            return MemoryReading.tightest(readings, self._options.gpu_memory_utilization)
        scarcest = min(readings, key=lambda reading: reading.available_bytes)
        most = max(reading.activation_bytes for reading in readings)
        return msgspec.structs.replace(scarcest, activation_bytes=most)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._send(AllocateCache(num_blocks=num_blocks, max_model_len=max_model_len))
        ready = self._said.gather(Allocated, deadline=self._start_ends)
        self.ranks_startup_s = tuple(rank for message in ready for rank in message.startup_s)
        self._is_serving = True

    def submit(self, plan: StepPlan) -> None:
        """Queues the step for every node, without waiting."""
        self._said.check()
        self._send(NodeStep(data=self._plans.encode(plan)))

    def collect(self) -> StepResult:
        timeout_s = self._options.step_timeout + GRACE_S
        try:
            data = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._fail(Failure(message=f"no node gave a step's result within {timeout_s:g} s", type="Timeout"))
            data = None
        self._said.check()
        assert data is not None, "None stands for a failure alone"
        return self._answers.decode(data)

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        self._said.check()
        self._send(NodeCommand(command=command))
        limit_s = command_limit_s(self._options.control_timeout) + GRACE_S
        answered = self._said.gather(NodeAnswered, deadline=Deadline(limit_s))
        for message in answered:
            if message.failure is not None:
                raise HeadraceError(failure=message.failure)
        return tuple(answer for message in answered for answer in message.answers)

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        self._said.check()
        self._send(FillSlot(slot=slot, path=path, is_3d=is_3d))
        limit_s = command_limit_s(self._options.control_timeout) + GRACE_S
        return agreed(self._said.gather(SlotFilled, deadline=Deadline(limit_s)))

    def drop_adapter(self, slot: int) -> None:
        self._send(FillSlot(slot=slot))

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        self._on_failure = on_failure
        if self._said.failure is not None:
            on_failure(self._said.failure)

    def watch_leaving(self, on_leaving: Callable[[str], None]) -> None:
        self._on_leaving = on_leaving

    def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._joining.close()
        if self._said.failure is None:
            self._send(Stop(deadline_s=STOP_S))
        for node in self._nodes.values():
            node.close()

    def hear(self, number: int, message: Message) -> None:
        """Handles a message of a node. Called from the nodes' threads."""
        if isinstance(message, NodeResult):
            self._results.put(message.data)
        elif isinstance(message, ChildFailed):
            self._fail(message.failure)
        elif isinstance(message, NodeLeaving):
            self._on_leaving(f"node {number}")
        else:
            self._said.hear(number, message)

    def _add(self, number: int, channel: Channel, where: str) -> None:
        node = RemoteNode(number, channel, where, lambda message: self.hear(number, message))
        with self._changed:
            self._nodes[number] = node
            self._changed.notify_all()
        if self._is_stopping:
            node.close()

    def _fail(self, failure: Failure) -> None:
        if self._is_stopping or not self._said.fail(failure):
            return
        logger.error("%s", failure.message)
        self._send(NodeEnd(failure=failure))
        self._results.put(None)
        self._on_failure(failure)

    def _start_nodes(self) -> None:
        """Starts the nodes that do not join by themselves: here the core's own host."""
        with self._changed:
            self._nodes[0] = LocalNode(self._options.master_addr, self._options, lambda message: self.hear(0, message))

    def _wait_for_nodes(self) -> None:
        timeout_s = self._options.node_join_timeout
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) == self._num_nodes or self._said.failure, timeout_s)
            missing = [str(number) for number in range(self._num_nodes) if number not in self._nodes]
        self._said.check()
        if missing:
            host, port = self.address
            raise EngineStartError(
                f"{self._num_nodes - len(missing)} of {self._num_nodes} nodes are here after {timeout_s:g} s "
                f"(node_join_timeout), and node_rank {', '.join(missing)} is missing; start it with the same options "
                f"and --node-rank {missing[0]} --master-addr {host} --master-port {port}"
            )

    def _error(self, failure: Failure) -> HeadraceError:
        return (EngineDeadError if self._is_serving else EngineStartError)(failure=failure)

    def _late(self, numbers: list[int]) -> None:
        names = ", ".join(f"node {number}" for number in numbers)
        what = f"become ready within {self._options.startup_timeout:g} s (startup_timeout)"
        if self._is_serving:
            what = f"answer a command within {self._options.control_timeout:g} s (control_timeout)"
        self._fail(Failure(message=f"{names} did not {what}", type="Timeout"))

    def _lagging(self, numbers: list[int]) -> str:
        return "wait for " + ", ".join(f"node {number}" for number in numbers)

    def _send(self, message: Message) -> None:
        for node in self._nodes.values():
            node.send(message)


class Node(Protocol):
    """One host, as seen by the core. Its messages are passed to the executor's `hear`."""

    def send(self, message: Message) -> None:
        """Does not wait and does not raise; the loss of a node is reported through `hear`."""

    def close(self) -> None: ...


class LocalNode:
    """The core's own host: an agent on a thread."""

    def __init__(self, host: str, own: Options, hear: Callable[[Message], None]) -> None:
        self._agent = NodeAgent(host, own, hear)
        self._thread = threading.Thread(target=self._agent.run, name="node 0", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._agent.take(message)

    def close(self) -> None:
        self._thread.join(STOP_S + 5.0)


class RemoteNode:
    """Another host, over the connection on which it joined."""

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
        """Closes once all sent messages have left, or after STOP_S if the node no longer reads."""
        self._outbox.put(None)
        self._threads[1].join(STOP_S)
        self._channel.close()

    def _speak(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # `_listen` reports it
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive(Deadline(None)))
        except BaseException as error:  # also what nobody expects: the core would wait for a node that nobody hears
            let_interrupts_pass(error)
            is_gone = isinstance(error, ChannelClosedError | CodecError | OSError)
            how = f"is gone: {error}" if is_gone else f"is lost: a message of it could not be handled ({error!r:.200})"
            failure = Failure(message=f"{self._name} {how}", type="PeerGone", process="node")
            self._hear(ChildFailed(failure=failure))


class NodeListener:
    """Admits nodes that know the key and fit; sends others the reason for their refusal, and goes on listening."""

    def __init__(
        self, options: Options, awaited: range, key: str, on_join: Callable[[int, Channel, str], None]
    ) -> None:
        """`on_join` gets each node's number, connection and address. Raises OptionError if it cannot listen."""
        self._options, self._awaited, self._on_join = options, awaited, on_join
        self._here: set[int] = set()
        self._admitting = threading.Lock()
        self._port = JoinPort(options, key, self._welcome)
        self.address = self._port.address

    def close(self) -> None:
        self._port.close()

    def _welcome(self, sock: socket.socket, where: str, hello: PeerClaims, seal: Seal) -> None:
        """Admits a node that has proved its key. Called on a thread of its own."""
        keep_alive(sock)
        channel = Channel(sock, FromNode, seal)
        try:
            self._admit(channel, hello)
        except (HeadraceError, WaitTimeoutError) as error:
            logger.warning("a node at %s was refused: %s", where, error)
            with contextlib.suppress(ChannelClosedError):
                channel.send(NodeEnd(failure=Failure.of(error, process="engine-core", phase="join")))
            channel.close()
            return
        self._on_join(hello.node_rank, channel, where)

    def _admit(self, channel: Channel, hello: PeerClaims) -> None:
        """Raises OptionError, with both values, for a node that does not fit."""
        check_same_version(PeerClaims.of(self._options), hello)
        join = channel.receive(Deadline(JOIN_S))
        if not isinstance(join, JoinNode):
            raise OptionError(f"JoinNode is due, and {type(join).__name__} came")
        self._check_fits(join)
        with self._admitting:
            if hello.node_rank not in self._awaited or hello.node_rank in self._here:
                numbers = f"{self._awaited.start} to {self._awaited.stop - 1}"
                why = "is here already" if hello.node_rank in self._here else f"is not one of {numbers}"
                raise OptionError(f"node_rank {hello.node_rank} {why}; give each node its own")
            self._here.add(hello.node_rank)

    def _check_fits(self, join: JoinNode) -> None:
        here = with_secrets(self._options, None)
        for name in join.options.__struct_fields__:
            ours, theirs = getattr(here, name), getattr(join.options, name)
            if ours != theirs and name not in OWN_TO_A_NODE:
                raise OptionError(
                    f"{name} is {ours!r} at the engine core and {theirs!r} at the node; give all nodes the same options"
                )


def check_cluster(options: Options) -> None:
    """Raises OptionError, with the numbers, where the options describe no possible cluster."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    if world_size % options.nnodes:
        raise OptionError(
            f"tensor_parallel_size={options.tensor_parallel_size} times pipeline_parallel_size="
            f"{options.pipeline_parallel_size} makes {world_size} ranks, which {options.nnodes} nodes (nnodes) cannot "
            "share evenly"
        )
