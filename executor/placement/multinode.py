"""The executor of a world on several hosts: an agent on each (node.py) starts and drives that host's workers.

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
import secrets
from collections.abc import Callable

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.placement.base import Executor, Report
from headrace.executor.placement.multiproc import check_equal, merged
from headrace.executor.placement.node import cluster_key
from headrace.executor.placement.node_messages import (
    LoadNode,
    NodeAnswered,
    NodeCommand,
    NodeDescribed,
    NodeEnd,
    NodeResult,
    NodeStep,
    RunNode,
)
from headrace.executor.placement.nodes import STOP_S, Lobby, LocalNode, Node, RemoteNode, check_cluster
from headrace.executor.placement.replies import Replies
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.placement.worker_messages import AllocateCache, Allocated, Loaded, MakeTokenizer, TokenizerMade
from headrace.ipc.channel import Channel
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import ChildFailed, Message, Stop, TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.wait import Deadline

logger = logging.getLogger(__name__)
GRACE_S = 5.0
"""By how much the core's patience outlasts the nodes' own, with a step and a start: they know which rank hangs."""


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
        self._said = Replies(num_nodes, error=self._error, late=self._late, lagging=self._lagging)
        self._changed = self._said.changed
        self._start_ends = Deadline(None)
        self._nodes: dict[int, Node] = {}
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
        self._start_ends = Deadline(self._options.startup_timeout + GRACE_S)
        report("find model")
        for number, node in self._nodes.items():
            first = number * self._ranks_per_node
            node.send(RunNode(options=self._options, first_rank=first, num_ranks=self._ranks_per_node))
        described = self._said.gather(NodeDescribed, report=report, deadline=self._start_ends)
        found = [message.description for message in described]
        check_equal(found, "node")
        self._store = next(message.store for message in described if message.store is not None)
        self.has_own_memory = described[0].has_own_memory
        # Each host has a memory of its own; blocks are as many as fit where a token takes most.
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
        """Hands the step to every node and waits for none."""
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
        assert data is not None, "only a failure is told by None"
        return self._answers.decode(data)

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        self._said.check()
        self._send(NodeCommand(command=command))
        answered = self._said.gather(NodeAnswered)
        for message in answered:
            if message.failure is not None:
                raise HeadraceError(failure=message.failure)
        return tuple(answer for message in answered for answer in message.answers)

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        self._on_failure = on_failure
        if self._said.failure is not None:
            on_failure(self._said.failure)

    def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._lobby.close()
        if self._said.failure is None:
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
            self._said.hear(number, message)

    def _add(self, number: int, channel: Channel, where: str) -> None:
        node = RemoteNode(number, channel, where, lambda message: self.hear(number, message))
        with self._changed:
            self._nodes[number] = node
            self._changed.notify_all()

    def _fail(self, failure: Failure) -> None:
        if self._is_stopping or not self._said.fail(failure):
            return
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
        limit_s = self._options.startup_timeout
        self._fail(
            Failure(message=f"{names} did not become ready within {limit_s:g} s (startup_timeout)", type="Timeout")
        )

    def _lagging(self, numbers: list[int]) -> str:
        return "wait for " + ", ".join(f"node {number}" for number in numbers)

    def _send(self, message: Message) -> None:
        for node in self._nodes.values():
            node.send(message)
