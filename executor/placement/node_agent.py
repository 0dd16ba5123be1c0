"""A node's agent: starts the workers of one host and drives them for an engine core elsewhere.

The core's own host has one too, on a thread. On every other host the agent is the program `engine-core --node-rank K`
or a Ray actor: it joins the core at master_addr:master_port, and ends when the core does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from headrace.core.options.engine_options import Options
from headrace.core.options.values import with_secrets
from headrace.executor.placement.adapter_orders import carry_out
from headrace.executor.placement.cluster_proof import NoProofError, cluster_key, prove_to_core
from headrace.executor.placement.multiproc import MultiprocExecutor
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.placement.worker_messages import (
    AllocateCache,
    Allocated,
    FillSlot,
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
    TokenizerMade,
    ToNode,
)
from headrace.executor.rank import Reporter
from headrace.ipc.failure import (
    EngineDeadError,
    EngineStartError,
    Failure,
    HeadraceError,
    InconsistentError,
    Interrupt,
    let_interrupts_pass,
)
from headrace.ipc.messages import ChildFailed, Message, Progress, Stop
from headrace.ipc.process.background import Background
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.transport.hosts import bare_host, host_port, listening
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
RETRY_S = 0.2
LEAVE_GRACE_S = 15.0
"""A node that was asked to end waits this much longer than shutdown_timeout for its core to end."""
PROOF_S = 5.0
"""How long the core may take to prove its key."""


class NodeAgent:
    """Accepts messages from any thread, and carries them out, in order, on the thread that calls `run`."""

    def __init__(self, host: str, own: Options, send: Callable[[Message], None]) -> None:
        """host: this machine's address, as the other nodes reach it. own: the options that this host was started with,
        and the only ones that its workers get. send: delivers a message to the core; must not raise."""
        self._host, self._own, self._send = bare_host(host), own, send
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._executor: MultiprocExecutor | None = None
        self._adapters = Background("adapters")
        self._plans, self._answers = StepCodec(StepPlan), StepCodec(StepResult)
        self.serves = False
        """Its ranks are ready for steps, so there may be requests to lose."""
        self._ends = False
        self._reporter = Reporter(self._report, self._read)

    def take(self, message: Message) -> None:
        self._orders.put(message)

    def run(self) -> NodeEnd | None:
        """Runs until Stop (returns None) or NodeEnd. Sends a failure to the core, which then ends all nodes."""
        try:
            while True:
                message = self._orders.get()
                if isinstance(message, NodeEnd):
                    return message
                if isinstance(message, Stop):
                    return None
                try:
                    self._carry_out(message)
                except BaseException as error:
                    let_interrupts_pass(error)
                    self._fail(Failure.of(error, process="node", phase=type(message).__name__))
        finally:
            self._ends = True
            if self._executor is not None:
                self._executor.stop()

    def _carry_out(self, message: Message) -> None:
        if isinstance(message, RunNode):
            self._start(message)
            return
        if isinstance(message, NodeLeaving):
            self._send(message)
            return
        executor = self._executor
        if executor is None:
            raise InconsistentError(f"{type(message).__name__} came before RunNode")
        if isinstance(message, NodeStep):
            executor.submit(self._plans.decode(message.data))
            self._steps.put(None)
        elif isinstance(message, MakeTokenizer):
            threading.Thread(target=self._make_tokenizer, name="tokenizer", daemon=True).start()
        elif isinstance(message, LoadNode):
            executor.meet(message.store, self._host, message.turns)
            self._send(Loaded(reading=executor.load(message.plan, self._reporter)))
        elif isinstance(message, AllocateCache):
            executor.allocate(message.num_blocks, message.max_model_len)
            if executor.replies:
                threading.Thread(target=self._collect, name="results", daemon=True).start()
            self.serves = True
            self._send(Allocated(startup_s=executor.ranks_startup_s))
        elif isinstance(message, FillSlot):
            self._adapters.submit(functools.partial(carry_out, executor, message, self._send, "node"))
        elif isinstance(message, NodeCommand):
            try:
                self._send(NodeAnswered(answers=executor.control(message.command)))
            except EngineDeadError:
                raise  # the workers have died, which is more than a failed command
            except HeadraceError as error:
                self._send(NodeAnswered(answers=(), failure=Failure.of(error, process="node", phase="control")))

    def _start(self, message: RunNode) -> None:
        ranks = range(message.first_rank, message.first_rank + message.num_ranks)
        store = None
        if 0 in ranks:  # bound here, so that the port is known before the other ranks need it
            store = listening(self._host, 0)
        executor = self._executor = MultiprocExecutor(self._own, ranks, store.fileno() if store else None)
        executor.watch(self._fail)
        description = executor.describe(self._reporter)
        address = (self._host, store.getsockname()[1]) if store else None
        if store is not None:
            store.close()  # the worker has inherited it
        self._send(NodeDescribed(description=description, store=address, has_own_memory=executor.has_own_memory))

    def _collect(self) -> None:
        assert self._executor is not None, "steps come after RunNode"
        while True:
            self._steps.get()
            try:
                self._send(NodeResult(data=self._answers.encode(self._executor.collect())))
            except BaseException as error:
                let_interrupts_pass(error)
                if not self._ends:
                    self._fail(Failure.of(error, process="node", phase="step"))
                return

    def _make_tokenizer(self) -> None:
        assert self._executor is not None, "the model is described first"
        try:
            self._send(TokenizerMade(bundle=self._executor.tokenizer()))
        except BaseException as error:
            let_interrupts_pass(error)
            self._fail(Failure.of(error, process="node", phase="tokenizer"))

    def _report(self, phase: str) -> None:
        self._send(Progress(phase=phase, seconds=0.0))

    def _read(self, read_bytes: int, total_bytes: int) -> None:
        self._send(Progress(phase="", seconds=0.0, read_bytes=read_bytes, total_bytes=total_bytes))

    def _fail(self, failure: Failure) -> None:
        self._send(ChildFailed(failure=failure))


def run_node(options: Options, heeded: Iterable[signal.Signals] = ()) -> None:
    """Makes this process the agent of node `node_rank`. Returns when the core has stopped in order.

    heeded: signals that ask it to end. While it serves the first one asks the core to let its requests finish; the node
    goes on until then, for at most shutdown_timeout and LEAVE_GRACE_S. A second one ends it at once.

    Raises EngineStartError when it cannot join, and EngineDeadError with the cause when the engine fails.
    """
    where = host_port(options.master_addr, options.master_port)
    channel, host = _join(options, where)
    agent = NodeAgent(host, options, lambda message: _say(channel, message))
    began = threading.Event()

    def listen() -> None:
        try:
            while True:
                message = channel.receive(Deadline(None))
                if isinstance(message, RunNode):
                    began.set()
                agent.take(message)
        except HeadraceError as error:
            agent.take(
                NodeEnd(failure=Failure(message=f"the engine core at {where} is gone: {error}", type="PeerGone"))
            )

    leaves: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        leaves.append(number)
        if not agent.serves or len(leaves) > 1:
            raise Interrupt(128 + number)
        agent.take(NodeLeaving())
        limit_s = options.shutdown_timeout + LEAVE_GRACE_S
        late = Failure(message=f"the engine core at {where} did not end within {limit_s:g} s", type="Timeout")
        timer = threading.Timer(limit_s, agent.take, (NodeEnd(failure=late),))
        timer.daemon = True
        timer.start()

    for number in heeded:
        signal.signal(number, leave)
    threading.Thread(target=listen, name="core", daemon=True).start()
    logger.info("node %d: joined the engine core at %s", options.node_rank, where)
    end = agent.run()
    channel.close()
    if end is not None:
        raise (EngineDeadError if began.is_set() else EngineStartError)(failure=end.failure)


def _join(options: Options, where: str) -> tuple[Channel, str]:
    """Connects to the core and joins it; returns the connection and this host's address on it."""
    deadline, key, said = Deadline(options.node_join_timeout), cluster_key(options), ""
    while True:
        try:
            sock = socket.create_connection(
                (bare_host(options.master_addr), options.master_port), timeout=deadline.remaining_s
            )
        except OSError as error:
            failure: Exception = error
        else:
            keep_alive(sock)
            try:
                seal = prove_to_core(sock, options, key, Deadline(PROOF_S))
                break
            except BaseException as error:
                sock.close()
                if not isinstance(error, NoProofError | WaitTimeoutError):
                    raise
                failure = error
            if str(failure) != said:
                said = str(failure)
                logger.warning("node %d: what listens at %s is no engine core yet: %s", options.node_rank, where, said)
        if deadline.passed:
            raise EngineStartError(
                f"node {options.node_rank} cannot reach the engine core at {where} after "
                f"{options.node_join_timeout:g} s (node_join_timeout): {failure}"
            ) from failure
        time.sleep(RETRY_S)  # nodes may be started in any order, and strangers may be in the way
    channel = Channel(sock, ToNode, seal)
    channel.send(JoinNode(options=with_secrets(options, None)))
    return channel, sock.getsockname()[0]


def keep_alive(sock: socket.socket) -> None:
    """Sends small messages at once, and detects a host that vanished silently within about 10 s."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _say(channel: Channel, message: Message) -> None:
    with contextlib.suppress(ChannelClosedError):  # the listening thread reports it
        channel.send(message)
