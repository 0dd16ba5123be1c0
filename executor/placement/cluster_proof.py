"""How the core and a node prove to each other that they know the cluster's key, before either reads anything else.

    core                                       node
                                          <-   Hello: its node_rank, nnodes, version, nonce      HELLO_BYTES
      Hello: likewise                     ->
                                          <-   proof of the node                                 PROOF_BYTES
      proof of the core, or REFUSED       ->

A proof is a MAC by the cluster's key (HMAC-SHA256, RFC 2104) over the sender's role and both Hellos, so it is of no use
to the other role, in another session or beside other facts. The node proves first: whoever only reaches the core's port
gets nothing from it to guess keys with. The key and both Hellos also give a key for each direction, by which each
message after the proofs has a MAC with its number (`channel.Seal`). A relay can only pass the messages on unchanged.

Only what has a fixed size is read before the proofs, and nothing of it is decoded by a codec.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass

from headrace import __version__
from headrace.core.options.engine_options import Options
from headrace.core.options.option import secret_bytes, secret_text
from headrace.executor.placement.worker_messages import WORKER_SCHEMA_HASH
from headrace.ipc.failure import EngineStartError, HeadraceError, OptionError
from headrace.ipc.process.own_secret import own_secret
from headrace.ipc.transport.channel import Seal
from headrace.ipc.transport.sockets import is_loopback
from headrace.ipc.wait import Deadline, wait_readable

KEY_VARIABLE = "HEADRACE_CLUSTER_KEY"
"""The environment variable with the secret that all nodes of a cluster share."""
PROTOCOL = b"headrace node 1\n"
"""Begins each Hello; changes with the layout."""
_HELLO = struct.Struct("!16sII16s24s32s")
HELLO_BYTES, PROOF_BYTES, NONCE_BYTES = _HELLO.size, hashlib.sha256().digest_size, 32
REFUSED = bytes(PROOF_BYTES)
"""What the core answers to a node without its key."""
OTHER_KEY = f"the node's {KEY_VARIABLE} is not the engine core's; set the same one on all nodes"
NODE, CORE = b"node", b"core"


class NoProofError(HeadraceError):
    """The other side has not proved that it knows the key."""


@dataclass(frozen=True)
class PeerClaims:
    """What one side tells of itself, bound into both proofs. Not to be believed before them."""

    node_rank: int
    nnodes: int
    schema_hash: str
    version: str
    nonce: bytes

    @classmethod
    def of(cls, options: Options) -> PeerClaims:
        return cls(options.node_rank, options.nnodes, WORKER_SCHEMA_HASH, __version__, os.urandom(NONCE_BYTES))

    def encode(self) -> bytes:
        schema, version = self.schema_hash.encode()[:16], self.version.encode()[:24]
        return _HELLO.pack(PROTOCOL, self.node_rank, self.nnodes, schema, version, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> PeerClaims:
        """Raises NoProofError for anything else than a Hello."""
        protocol, node_rank, nnodes, schema, version, nonce = _HELLO.unpack(data)
        if protocol != PROTOCOL:
            raise NoProofError("what it sends is not the greeting of a node of this version")
        text = [part.rstrip(b"\0").decode("ascii", "replace") for part in (schema, version)]
        return cls(node_rank, nnodes, text[0], text[1], nonce)


class Proofs:
    """The proofs and the session's keys that follow from the cluster's key and both Hellos, as they were sent."""

    def __init__(self, key: str, core: bytes, node: bytes) -> None:
        self._key, self._facts = secret_bytes(key), core + node

    def of(self, role: bytes) -> bytes:
        return self._mac(b"proof of the " + role)

    def seal(self, own: bytes, other: bytes) -> Seal:
        return Seal(sends=self._mac(b"messages of the " + own), receives=self._mac(b"messages of the " + other))

    def _mac(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + self._facts, "sha256")


def check_same_version(core: PeerClaims, node: PeerClaims) -> None:
    """Raises OptionError, with both versions, for programs whose messages differ."""
    if core.schema_hash != node.schema_hash:
        raise OptionError(
            f"the engine core runs headrace {core.version} with message schema {core.schema_hash}, and the node "
            f"{node.version} with {node.schema_hash}: install the same version on all nodes"
        )


def prove_to_core(sock: socket.socket, options: Options, key: str, deadline: Deadline) -> Seal:
    """The node's side, on a new connection. Returns the seal of all messages that follow.

    Raises NoProofError where the other side went away or is no core, and EngineStartError where it has another key.
    """
    own = PeerClaims.of(options)
    _send(sock, own.encode())
    theirs = _receive(sock, HELLO_BYTES, deadline)
    core = PeerClaims.decode(theirs)
    proofs = Proofs(key, core=theirs, node=own.encode())
    _send(sock, proofs.of(NODE))
    if not hmac.compare_digest(_receive(sock, PROOF_BYTES, deadline), proofs.of(CORE)):
        raise EngineStartError(OTHER_KEY)
    check_same_version(core, own)
    return proofs.seal(NODE, CORE)


def cluster_key(options: Options) -> str:
    """The cluster's key: HEADRACE_CLUSTER_KEY, as it is meant (`secret_text`).

    Nodes of one host, on its loopback interface, do without: they find a key in this user's runtime directory, so that
    no other user of the host passes for one of them. Raises OptionError where other hosts need a key and there is none.
    """
    if key := secret_text(os.environ.get(KEY_VARIABLE, "")):
        return key
    if is_loopback(options.master_addr):
        return own_secret("cluster-key")
    raise OptionError(
        f"master_addr={options.master_addr} is reachable from other machines: set {KEY_VARIABLE} to the same "
        "secret on all nodes (openssl rand -hex 32 makes one), and keep their network private, as what they say is "
        "not encrypted"
    )


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise NoProofError(f"it went away ({error})") from error


def _receive(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < size:
        wait_readable(sock.fileno(), deadline, what="the proof of the engine core")
        try:
            part = sock.recv(size - len(data))
        except OSError as error:
            raise NoProofError(f"it went away ({error})") from error
        if not part:
            raise NoProofError("it closed the connection before it proved that it is the engine core")
        data += part
    return data
