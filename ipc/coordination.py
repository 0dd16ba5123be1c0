"""The messages between a coordinator and the engines and frontends that register with it.

    engine   --- Announce, once a second; Withdraw ------>  coordinator
             <-- Ended, to one that it takes for gone ---
    frontend --- Follow, every few seconds; Unfollow ---->
             <-- Members -------------------------------

Where the coordinator has keys, only who holds the secret key of the deployment's engines speaks for one: each Announce
and Withdraw has a proof (`signed`). A client has none, and may only follow.

All state is soft: the receiver keeps it for a lease, and the next message repairs whatever a lost, late or duplicated
one got wrong. A lease is a duration, measured by the receiver's own clock.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, TypeVar

import msgspec

from headrace.ipc.codec import Tensor
from headrace.ipc.messages import Message, hash_of
from headrace.ipc.ranges import INT32, Longest, Range

LEASE_S = 5.0
"""How long an announcement is valid, unless it says otherwise."""
ANNOUNCE_EVERY_S = 1.0
FOLLOW_EVERY_S = 2.0
Text = Annotated[str, Longest(4096)]
Count = Annotated[int, Range(0, INT32)]
Proof = Annotated[bytes, Longest(hashlib.sha256().digest_size)]


class EngineEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine's description of itself. Fields that also appear in `messages.Welcome` have the same meaning."""

    address: Text
    life: Text
    """Identifies one run of the engine: drawn at random at each start."""
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
    """The engine is alive. A message whose number is not above the last one received of the same life is ignored."""

    schema_hash: str
    entry: EngineEntry
    number: Count
    lease_s: Annotated[float, Range(0.1, 3600.0)] = LEASE_S
    num_running: Count = 0
    num_waiting: Count = 0
    is_paused: bool = False
    proof: Proof = b""
    """See `signed`."""


class Withdraw(Message, frozen=True):
    """This life of the engine at this address has ended: its messages are ignored from now on, however late."""

    address: Text
    life: Text
    proof: Proof = b""
    """See `signed`."""


class Follow(Message, frozen=True):
    """A frontend subscribes to the list of engines, for one lease."""

    schema_hash: str
    lease_s: Annotated[float, Range(0.1, 3600.0)] = 3 * FOLLOW_EVERY_S
    needs_all: bool = False
    """The frontend has missed a message and needs the complete list."""


class Unfollow(Message, frozen=True):
    """The frontend ends its subscription."""


ToCoordinator = Announce | Withdraw | Follow | Unfollow


class Listed(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    key: int
    """Identifies this life of the engine in `Members.loads`, as long as the coordinator runs."""
    entry: EngineEntry


class Gone(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    address: str
    life: str
    withdrew: bool
    """True if the engine sent Withdraw, false if its lease ran out."""


class Members(Message, frozen=True):
    """The known engines, or the changes since the Members before."""

    epoch: str
    """Identifies one run of the coordinator: drawn at random at its start."""
    number: int
    """One more than the number of the Members before."""
    is_all: bool
    """`listed` holds all known engines, rather than only the changes."""
    lease_s: float
    """For this long after its start a coordinator may not have received every engine's announcement."""
    listed: tuple[Listed, ...] = ()
    gone: tuple[Gone, ...] = ()
    loads: Tensor = Tensor.of("int32", [])
    """[4 * num_engines] int32: key, number of running requests, number of waiting requests, 1 if paused"""


class Denied(Message, frozen=True):
    """The last message could not be accepted. The first field has the same position in every version."""

    schema_hash: str
    why: str


class Ended(Message, frozen=True):
    """The engine at this address has announced a life that counts as ended, and no other one is known there."""

    address: Text
    life: Text


FromCoordinator = Members | Denied | Ended

SCHEMA_HASH = hash_of(ToCoordinator, FromCoordinator)

Announcement = TypeVar("Announcement", Announce, Withdraw)


def signed(message: Announcement, secret: str) -> Announcement:
    """The message with its proof: a MAC (HMAC-SHA256) by the engines' secret key. The connection that carries it is
    encrypted, so that nobody can repeat what an engine has said."""
    return msgspec.structs.replace(message, proof=_mac(message, secret))


def is_signed(message: Announce | Withdraw, secret: str) -> bool:
    return hmac.compare_digest(message.proof, _mac(message, secret))


def _mac(message: Announce | Withdraw, secret: str) -> bytes:
    content = msgspec.msgpack.encode(msgspec.structs.replace(message, proof=b""))
    return hmac.digest(secret.encode(), b"headrace announcement\0" + content, "sha256")
