"""What the engine core of several hosts and the agents of their workers say to each other, over TCP. No torch.

    core (node 0)                                    agent, one per node
                                                <-     (connects to master_addr:master_port)
      NodeChallenge(nonce)                      ->
                                                <-   JoinNode(node_rank, options, proof)
      RunNode(options, ranks)  or NodeEnd       ->     its workers start
                                                <-   Progress *, NodeDescribed(description, store)
      MakeTokenizer                             ->     the node of rank 0
                                                <-   TokenizerMade
      LoadNode(plan, store)                     ->
                                                <-   Loaded(reading)
      AllocateCache                             ->
                                                <-   Allocated
      NodeStep(plan), NodeCommand(command)      ->
                                                <-   NodeResult(result) of the rank that replies, NodeAnswered
      Stop(deadline_s), NodeEnd(failure)        ->

An agent that fails says ChildFailed; the end of the connection is the other side's death.
"""

from __future__ import annotations

import hashlib
import hmac

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import ModelDescription, Plan
from headrace.executor.placement.worker_messages import AllocateCache, Allocated, Loaded, MakeTokenizer, TokenizerMade
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure
from headrace.ipc.messages import ChildFailed, Message, Progress, Stop

PROOF_BYTES = 32


class NodeChallenge(Message, frozen=True):
    nonce: bytes


class JoinNode(Message, frozen=True):
    schema_hash: str
    """Of the messages to workers, and so of the version."""
    version: str
    node_rank: int
    options: Options
    proof: bytes
    """HMAC-SHA256 of the nonce by the cluster's key; see `prove`."""


class RunNode(Message, frozen=True):
    options: Options
    first_rank: int
    num_ranks: int


class NodeDescribed(Message, frozen=True):
    description: ModelDescription
    store: tuple[str, int] | None
    """Where rank 0 will meet the others; from its node only."""
    has_own_memory: bool = False
    """See Executor: of each of its ranks."""


class LoadNode(Message, frozen=True):
    plan: Plan
    store: tuple[str, int]
    turns: str


class NodeStep(Message, frozen=True):
    data: bytes
    """An encoded StepPlan."""


class NodeCommand(Message, frozen=True):
    command: WorkerCommand


class NodeResult(Message, frozen=True):
    data: bytes
    """An encoded StepResult."""


class NodeAnswered(Message, frozen=True):
    answers: tuple[WorkerAnswer, ...]
    failure: Failure | None = None


class NodeEnd(Message, frozen=True):
    """The node is not wanted, or the engine has failed: why."""

    failure: Failure


ToNode = NodeChallenge | RunNode | MakeTokenizer | LoadNode | AllocateCache | NodeStep | NodeCommand | NodeEnd | Stop
FromNode = (
    JoinNode | Progress | NodeDescribed | TokenizerMade | Loaded | Allocated | NodeResult | NodeAnswered | ChildFailed
)


def prove(key: str, nonce: bytes) -> bytes:
    """That one knows the key (RFC 2104), without saying it."""
    return hmac.new(key.encode(), nonce, hashlib.sha256).digest()
