"""The executor of a world on several hosts: an agent on each (executor/node.py) starts and drives that host's workers.

    core's loop          this host's agent, on a thread  -->  MultiprocExecutor of its ranks
      submit, collect -->
                         TCP  -->  agent of node 1       -->  MultiprocExecutor of its ranks
                              ...

The ranks themselves talk gloo, across all hosts. Every node is given every step; the one with the rank whose results
count sends them back. The first failure anywhere ends all nodes, and is what the user sees.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.core.options import Options
from headrace.core.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.base import Executor, Report
from headrace.executor.multiproc import SHARES, check_equal
from headrace.executor.node import cluster_key
from headrace.executor.node_messages import (
    LoadNode,
    NodeAnswered,
    NodeCommand,
    NodeDescribed,
    NodeEnd,
    NodeResult,
    NodeStep,
    RunNode,
)
from headrace.executor.nodes import STOP_S, Lobby, LocalNode, Node, RemoteNode, check_cluster
from headrace.executor.step_codec import StepCodec
from headrace.executor.worker_messages import AllocateCache, Allocated, Loaded, MakeTokenizer, TokenizerMade
from headrace.ipc.channel import Channel
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import ChildFailed, Message, Progress, Stop, TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
GRACE_S = 5.0
"""By how much the core's patience with a step outlasts the nodes' own, which know which rank hangs."""


class MultiNodeExecutor(Executor):
    """Owns the nodes. Called from the core's loop thread; `hear` from the nodes' threads."""

    async_by_default = True

    def __init__(self, options: Options) -> None:
        """Listens for the other hosts, and starts nothing yet. Raises OptionError, with the numbers."""
        check_cluster(options)
        self._open(options, options.nnodes, range(1, options.nnodes), cluster_key())

    def _open(self, options: Options, num_nodes: int, awaited: range, key: str) -> None:
        """Listens for the nodes of these numbers, if they know the key."""
        self._options, self._num_nodes = options, num_nodes
        self._ranks_per_node = options.tensor_parallel_size * options.pipeline_parallel_size // num_nodes
        self.num_stages = options.pipeline_parallel_size
        self.max_steps_in_flight = options.pipeline_parallel_size + 1
        self._plans, self._answers = StepCodec(StepPlan), StepCodec(StepResult)
        self._results: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._heard: list[list[Message]] = [[] for _ in range(self._num_nodes)]
        self._nodes: dict[int, Node] = {}
        self._failure: Failure | None = None
        self._on_failure: Callable[[Failure], None] = lambda failure: None
        self._is_serving = self._is_stopping = False
        self._store: tuple[str, int] | None = None
        self._lobby = Lobby(options, awaited, key, self._add)
        self.address = self._lobby.address
        """Where nodes join."""

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
        self._lobby.close()
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

    def _add(self, number: int, channel: Channel, where: str) -> None:
        node = RemoteNode(number, channel, where, lambda message: self.hear(number, message))
        with self._changed:
            self._nodes[number] = node
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
