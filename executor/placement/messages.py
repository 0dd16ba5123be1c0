"""What a core, its workers and the agents of other nodes say to each other. Imports no torch.

Over the socket that a worker inherits (see ipc/transport/channel.py):

    core                                        worker
      StartWorker(options, rank, memory)   ->     every worker at once
                                           <-   Progress(phase, seconds) *
                                           <-   Described(description)
      MakeTokenizer                        ->     the first worker, which does so while the weights are read
                                           <-   TokenizerMade(bundle)
      LoadModel(plan, rings)               ->
                                           <-   Loaded(reading)
      AllocateCache(num_blocks, length)    ->
                                           <-   Allocated
      Stop(deadline_s)                     ->

From then on steps go through the rings, and the socket carries what is rare or large: a LargeMessage in place of
one that does not fit a slot, and Answers to commands. A worker that fails says ChildFailed, at any time, and exits.

Over TCP, where an engine is on several hosts; each node's agent starts and drives the workers there:

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
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure
from headrace.ipc.messages import SCHEMA_HASH, ChildFailed, Message, Progress, Ready, Stop, TokenizerBundle
from headrace.ipc.transport.ring import RingLayout

STEP, COMMAND, COUNTS = 0, 1, 2
"""Kinds of message in the ring to the workers: an encoded StepPlan, an encoded WorkerCommand, and, where experts are
shared, how many tokens each core has in the step that comes, or in one of other cores' tokens alone."""
WAIT_FOR_CORE, WAIT_FOR_TURN = "wait for the core", "wait for a turn to load"
"""Phases of a worker in which it does nothing itself."""
PROOF_BYTES = 32


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors of memfds that the workers inherit; they get their sizes before anybody opens them."""

    steps: int
    """The ring from the core to all workers."""
    results: int
    """The ring from the worker whose results count to the core."""
    collectives: int
    """What the workers say to each other."""


class StartWorker(Message, frozen=True):
    schema_hash: str
    options: Options
    rank: int
    memory: SharedMemory
    first_rank: int
    """Of those on this host."""
    num_ranks: int
    """On this host."""
    began_s: float
    """When it was started: time.monotonic, which all processes of a host share."""
    store_fd: int = -1
    """A listening socket that rank 0 inherits: where the ranks of several hosts meet."""


class SharedExperts(msgspec.Struct, frozen=True, array_like=True):
    """Of engine cores that divide the experts among them: how a worker meets those of its number in the others."""

    memory: str
    """A file, while the core is there: the memory of all cores."""
    rank: int
    """data_parallel_rank"""
    size: int


class LoadModel(Message, frozen=True):
    plan: Plan
    steps: RingLayout
    results: RingLayout
    turns: str
    """What the workers' turns to read weights are called; see load_turn.py."""
    store: tuple[str, int] | None = None
    """Where the ranks of several hosts meet; those of one share memory."""
    host: str = ""
    """This host's address as the others reach it."""
    shared_experts: SharedExperts | None = None


class MakeTokenizer(Message, frozen=True):
    pass


class AllocateCache(Message, frozen=True):
    num_blocks: int
    max_model_len: int


class LargeMessage(Message, frozen=True):
    """The content of message `number` of the ring that leads the same way."""

    number: int
    data: bytes


class Described(Message, frozen=True):
    description: ModelDescription
    has_own_memory: bool = False
    """See Executor."""


class TokenizerMade(Message, frozen=True):
    bundle: TokenizerBundle | None


class Loaded(Message, frozen=True):
    reading: MemoryReading


class Allocated(Message, frozen=True):
    """The worker is ready; or all workers of a node are."""

    startup_s: tuple[dict[str, float], ...]
    """Of each, by rank: how long each phase took from its start to here."""


class Answered(Message, frozen=True):
    """To a command: its answer, or why it could not be carried out."""

    answer: WorkerAnswer | None
    failure: Failure | None = None


ToWorker = StartWorker | LoadModel | MakeTokenizer | AllocateCache | LargeMessage | Stop
FromWorker = Progress | Ready | ChildFailed | Described | TokenizerMade | Loaded | Allocated | LargeMessage | Answered


def _schema_hash() -> str:
    """Of every field of these messages, and of the core's own, so that a worker of another version is refused."""
    seen: dict[str, str] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls.__name__ not in seen:
            seen[kind.cls.__name__] = " ".join(field.encode_name for field in kind.fields)
            for field in kind.fields:
                visit(field.type)
        for part in (*getattr(kind, "types", ()), getattr(kind, "item_type", None)):
            if part is not None:
                visit(part)

    for union in (ToWorker, FromWorker, WorkerCommand):
        visit(msgspec.inspect.type_info(union))
    text = SCHEMA_HASH + "".join(f"\n{name} {fields}" for name, fields in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


WORKER_SCHEMA_HASH = _schema_hash()


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
