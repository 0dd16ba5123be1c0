"""What engines and frontends say to a coordinator, and what it says to frontends.

    engine   --- Announce, once a second; Withdraw ------>  coordinator
    frontend --- Follow, every few seconds; Unfollow ---->
             <-- Members -------------------------------

All of it is soft state, held for a lease by whoever hears it: a message that is lost, late or doubled changes nothing
that the next one does not mend. Leases are lengths of time, told by the receiver's own clock.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from headrace.ipc.codec import Tensor
from headrace.ipc.messages import Message, hash_of
from headrace.ipc.ranges import INT32, Longest, Range

LEASE_S = 5.0
"""How long what was announced is believed, unless the announcement says else."""
ANNOUNCE_EVERY_S = 1.0
FOLLOW_EVERY_S = 2.0
Text = Annotated[str, Longest(4096)]
Count = Annotated[int, Range(0, INT32)]


class EngineEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine as it announces itself. Fields that tell what it serves are as in Welcome."""

    address: Text
    life: Text
    """Drawn anew at each start."""
    model: Text
    served_model_names: tuple[Text, ...]
    rank: Count
    """data_parallel_rank"""
    host: Text
    pid: Count
    max_num_seqs: Count
    max_waiting_requests: Count
    block_size: Count
    is_draining: bool = False


class Announce(Message, frozen=True):
    """An engine is there. Of one life, what has no higher number than what was heard before it is late, and ignored."""

    schema_hash: str
    entry: EngineEntry
    number: Count
    lease_s: Annotated[float, Range(0.1, 3600.0)] = LEASE_S
    num_running: Count = 0
    num_waiting: Count = 0
    is_paused: bool = False


class Withdraw(Message, frozen=True):
    """This life of the engine at this address is over: nothing of it counts from now on, however late it comes."""

    address: Text
    life: Text


class Follow(Message, frozen=True):
    """A frontend wants to be told of engines, for a lease."""

    schema_hash: str
    lease_s: Annotated[float, Range(0.1, 3600.0)] = 3 * FOLLOW_EVERY_S
    needs_all: bool = False
    """What it knows has gaps."""


class Unfollow(Message, frozen=True):
    """It does not any more."""


ToCoordinator = Announce | Withdraw | Follow | Unfollow


class Listed(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    key: int
    """Names this life of the engine in `Members.loads`, for as long as the coordinator lives."""
    entry: EngineEntry


class Gone(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    address: str
    life: str
    withdrew: bool
    """It said so; else its lease has run out."""


class Members(Message, frozen=True):
    """The engines that there are, or what has changed among them."""

    epoch: str
    """Of the coordinator: drawn at its start."""
    number: int
    """One more than that of the Members before."""
    is_all: bool
    """These are all engines; what is not listed is not known."""
    lease_s: float
    """After its start a coordinator may not have heard all engines for so long."""
    listed: tuple[Listed, ...] = ()
    gone: tuple[Gone, ...] = ()
    loads: Tensor = Tensor.of("int32", [])
    """[4 * num_engines] int32: key, requests that run, that wait, whether it is paused"""


class Denied(Message, frozen=True):
    """What was sent last could not be taken. Its leading field keeps its place in every version."""

    schema_hash: str
    why: str


FromCoordinator = Members | Denied

SCHEMA_HASH = hash_of(ToCoordinator, FromCoordinator)
