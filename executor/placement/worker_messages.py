"""Messages between a core, its workers and the agents of other nodes. Imports no torch.

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

After that steps go through the rings, and the socket carries only what is rare or large: a LargeMessage for content
that does not fit a slot, the Answered to a command, and FillSlot with its SlotFilled, for adapters beside steps. A
worker that fails sends ChildFailed, at any time, and exits.

Over TCP, where an engine is on several hosts; each node's agent starts and drives the workers there:

    core (node 0)                                    agent, one per node
                                                <-     (connects to master_addr:master_port)
                                               <->     both prove their key (cluster_proof.py)
                                                <-   JoinNode(options)
      RunNode(ranks)  or NodeEnd                ->     its workers start, with its own options
                                                <-   Progress *, NodeDescribed(description, store)
      MakeTokenizer                             ->     the node of rank 0
                                                <-   TokenizerMade
      LoadNode(plan, store)                     ->
                                                <-   Loaded(reading)
      AllocateCache                             ->
                                                <-   Allocated
      NodeStep(plan), NodeCommand(command)      ->
                                                <-   NodeResult(result) of the rank that replies, NodeAnswered
      FillSlot                                  ->
                                                <-   SlotFilled
      Stop(deadline_s), NodeEnd(failure)        ->

An agent that fails sends ChildFailed; a closed connection means that the other side has died.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure
from headrace.ipc.messages import SCHEMA_HASH, ChildFailed, Message, Progress, Ready, Stop, TokenizerBundle
from headrace.ipc.transport.ring import RingLayout

STEP, COMMAND, COUNTS = 0, 1, 2
"""Kinds of message in the ring to the workers: an encoded StepPlan; an encoded WorkerCommand; with shared experts, each
core's number of tokens in the next step, in which this core may have none."""
WAIT_FOR_CORE, WAIT_FOR_TURN = "wait for the core", "wait for a turn to load"
"""Phases in which a worker only waits."""


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors of memfds that the workers inherit; the core sets their sizes before anyone maps them."""

    steps: int
    """The ring from the core to all workers."""
    results: int
    """The ring to the core from the worker of the rank that replies."""
    collectives: int
    """Memory for collectives between the workers."""


class StartWorker(Message, frozen=True):
    schema_hash: str
    options: Options
    rank: int
    memory: SharedMemory
    first_rank: int
    """Lowest rank on this host."""
    num_ranks: int
    """Number of ranks on this host."""
    began_s: float
    """When it was started: time.monotonic, which is the same in all processes of a host."""
    store_fd: int = -1
    """A listening socket that rank 0 inherits, at which the ranks of several hosts join."""


class SharedExperts(msgspec.Struct, frozen=True, array_like=True):
    """With experts divided among engine cores: how a worker joins the workers of its rank in the other cores."""

    memory: str
    """Path of the memory that all cores share; exists while the core runs."""
    rank: int
    """data_parallel_rank"""
    size: int


class LoadModel(Message, frozen=True):
    plan: Plan
    steps: RingLayout
    results: RingLayout
    turns: str
    """Name of the workers' turns to read weights; see load_turn.py."""
    store: tuple[str, int] | None = None
    """Address at which the ranks of several hosts join; None on one host, where they share memory."""
    host: str = ""
    """This host's address, as the others reach it."""
    shared_experts: SharedExperts | None = None


class MakeTokenizer(Message, frozen=True):
    pass


class AllocateCache(Message, frozen=True):
    num_blocks: int
    max_model_len: int


class LargeMessage(Message, frozen=True):
    """The content of message `number` of the ring in the same direction."""

    number: int
    data: bytes


class Described(Message, frozen=True):
    description: ModelDescription
    has_own_memory: bool = False
    """See `ModelHost`."""


class TokenizerMade(Message, frozen=True):
    bundle: TokenizerBundle | None


class Loaded(Message, frozen=True):
    reading: MemoryReading


class Allocated(Message, frozen=True):
    """The worker, or all workers of a node, are ready."""

    startup_s: tuple[dict[str, float], ...]
    """Seconds of each phase from start to ready, by rank."""


class Answered(Message, frozen=True):
    """The reply to a command: its answer, or why it could not be carried out."""

    answer: WorkerAnswer | None
    failure: Failure | None = None


class FillSlot(Message, frozen=True):
    """Loads an adapter into a slot, beside running steps, or empties it."""

    slot: int
    path: str = ""
    """Empty: the slot is emptied, and there is no answer."""
    is_3d: bool = False


class SlotFilled(Message, frozen=True):
    """The answer to a FillSlot with a path, of a worker or of all workers of a node."""

    facts: AdapterFacts | None
    failure: Failure | None = None


ToWorker = StartWorker | LoadModel | MakeTokenizer | AllocateCache | LargeMessage | FillSlot | Stop
FromWorker = (
    Progress
    | Ready
    | ChildFailed
    | Described
    | TokenizerMade
    | Loaded
    | Allocated
    | LargeMessage
    | Answered
    | SlotFilled
)


class JoinNode(Message, frozen=True):
    options: Options
    """Must equal the core's."""


class RunNode(Message, frozen=True):
    """The node starts its workers with the options of its own command line: they may name code."""

    first_rank: int
    num_ranks: int


class NodeDescribed(Message, frozen=True):
    description: ModelDescription
    store: tuple[str, int] | None
    """Address at which rank 0 will wait for the other ranks; only from its node."""
    has_own_memory: bool = False
    """See `ModelHost`; the same for each of its ranks."""


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


class NodeLeaving(Message, frozen=True):
    """The node was asked to end, and does so once the core, which lets its requests finish, sends Stop."""


class NodeEnd(Message, frozen=True):
    """Refuses the node, or ends it because the engine has failed."""

    failure: Failure


ToNode = RunNode | MakeTokenizer | LoadNode | AllocateCache | NodeStep | NodeCommand | FillSlot | NodeEnd | Stop
FromNode = (
    JoinNode
    | Progress
    | NodeDescribed
    | TokenizerMade
    | Loaded
    | Allocated
    | NodeResult
    | NodeAnswered
    | SlotFilled
    | NodeLeaving
    | ChildFailed
)


def _schema_hash() -> str:
    """A hash of every field of these messages and of the core's own, by which another version's workers and nodes are
    refused."""
    seen: dict[str, str] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls.__name__ not in seen:
            seen[kind.cls.__name__] = " ".join(field.encode_name for field in kind.fields)
            for field in kind.fields:
                visit(field.type)
        for part in (*getattr(kind, "types", ()), getattr(kind, "item_type", None)):
            if part is not None:
                visit(part)

    for union in (ToWorker, FromWorker, WorkerCommand, ToNode, FromNode):
        visit(msgspec.inspect.type_info(union))
    text = SCHEMA_HASH + "".join(f"\n{name} {fields}" for name, fields in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


WORKER_SCHEMA_HASH = _schema_hash()
