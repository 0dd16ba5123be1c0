"""Nodes join only a core that knows the cluster's key, and a core only takes nodes that do; strangers cost neither."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from multiproc_parts import HERE, options
from patience import wait_until
from test_multinode import null_flags, on_two_nodes, start_node
from thinned import pairs

from headrace.core.options.engine_options import Options
from headrace.executor.placement import join_port
from headrace.executor.placement.cluster_proof import (
    HELLO_BYTES,
    KEY_VARIABLE,
    PROOF_BYTES,
    REFUSED,
    NoProofError,
    PeerClaims,
    Proofs,
    cluster_key,
    prove_to_core,
)
from headrace.executor.placement.join_port import MOST_STRANGERS, JoinPort
from headrace.executor.placement.multinode import MultiNodeExecutor, RemoteNode
from headrace.executor.placement.worker_messages import FromNode, JoinNode, RunNode
from headrace.ipc.codec import Codec, CodecError
from headrace.ipc.failure import EngineStartError, OptionError
from headrace.ipc.messages import ChildFailed, Message, Progress
from headrace.ipc.transport.channel import Channel, Seal
from headrace.ipc.wait import Deadline

KEY = "0123456789abcdef"
_LENGTH = struct.Struct("<I")


@pytest.fixture(autouse=True)
def workers_find_the_null_rank(monkeypatch: pytest.MonkeyPatch, runtime_directory: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


class NodeChallenge(Message, frozen=True):
    """What a core once began with: its nodes believed whoever sent it."""

    nonce: bytes


class Leader:
    """A listener that is not the core, at the address where a node expects it; `speak` answers each connection."""

    def __init__(self, speak: Callable[[socket.socket], None]) -> None:
        self._speak = speak
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.received = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            self._speak(sock)
            sock.settimeout(5.0)
            while data := sock.recv(1 << 16):
                self.received += data


def framed(message: Message) -> bytes:
    (data,) = Codec[Any](RunNode).encode(message)
    return _LENGTH.pack(len(data)) + bytes(data)


def run_evil(own: Options) -> bytes:
    """Orders to run the workers of another class, as a core of before gave them and as it gives them now."""

    class OldRunNode(Message, frozen=True, tag="RunNode"):
        options: Options
        first_rank: int
        num_ranks: int

    evil = msgspec.structs.replace(own, worker_cls="evil_rank:EvilRank", nnodes=2)
    orders = (OldRunNode(options=evil, first_rank=1, num_ranks=1), RunNode(first_rank=1, num_ranks=1))
    return b"".join(map(framed, orders))


@pytest.fixture
def evil_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that the node could import, and the file that it leaves behind when it is."""
    ran = tmp_path / "ran"
    (tmp_path / "evil_rank.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass EvilRank: ...\n")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{tmp_path}")
    return ran


@pytest.mark.parametrize(
    ("speaks", "key"), pairs(("the old way", "as a core", "as a core with another key", "and reflects"), (KEY, ""))
)
def test_a_leader_without_the_key_makes_a_node_run_nothing(speaks: str, key: str, evil_rank: Path) -> None:
    own = options()

    def speak(sock: socket.socket) -> None:
        if speaks == "the old way":
            sock.sendall(framed(NodeChallenge(nonce=b"n" * 32)) + run_evil(own))
            return
        theirs = _read(sock, HELLO_BYTES)
        core = theirs if speaks == "and reflects" else PeerClaims.of(own).encode()
        sock.sendall(core)
        proof = _read(sock, PROOF_BYTES)
        if speaks == "as a core with another key":
            proof = Proofs("another", core=core, node=theirs).of(b"core")
        sock.sendall(proof + run_evil(own))

    leader = Leader(speak)
    environment = {KEY_VARIABLE: key} if key else {}
    node = start_node(leader.port, *null_flags(own), "--node-join-timeout=0.5", **environment)
    try:
        _, log = node.communicate(timeout=60)
    finally:
        node.kill()
        leader.listener.close()
    assert not evil_rank.exists()
    assert node.returncode == 1
    assert "cannot reach the engine core" in log or f"the node's {KEY_VARIABLE} is not the engine core's" in log
    assert b"evil_rank" not in leader.received
    assert b"null_rank" not in leader.received, "the node's options are for the core alone"


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data


class Joined:
    """A JoinPort and what it let in."""

    def __init__(self, asked: Options, key: str = KEY) -> None:
        self.members: list[tuple[socket.socket, PeerClaims, Seal]] = []
        self.port = JoinPort(asked, key, lambda sock, where, hello, seal: self.members.append((sock, hello, seal)))
        self.address = self.port.address

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10.0)

    def join(self, asked: Options, key: str = KEY, deadline_s: float = 10.0) -> tuple[socket.socket, Seal]:
        sock = self.connect()
        try:
            return sock, prove_to_core(sock, asked, key, Deadline(deadline_s))
        except BaseException:
            sock.close()
            raise


@contextmanager
def join_at(asked: Options, key: str = KEY) -> Iterator[Joined]:
    joined = Joined(asked, key)
    try:
        yield joined
    finally:
        joined.port.close()
        for sock, _, _ in joined.members:
            sock.close()


ASKED = on_two_nodes(options())
SECOND = msgspec.structs.replace(ASKED, node_rank=1)


def test_both_prove_the_key_and_what_follows_is_sealed() -> None:
    with join_at(ASKED) as joined:
        sock, seal = joined.join(SECOND)
        with sock:
            wait_until(lambda: bool(joined.members), 10.0, "the node's admission")
            theirs, hello, their_seal = joined.members[0]
            assert (hello.node_rank, hello.nnodes) == (1, 2)
            theirs.setblocking(True)
            node, core = Channel(sock, RunNode, seal), Channel(theirs, JoinNode, their_seal)
            node.send(JoinNode(options=SECOND))
            assert core.receive(Deadline(10.0)).options == SECOND
            for first_rank in range(3):
                core.send(RunNode(first_rank=first_rank, num_ranks=1))
            assert [node.receive(Deadline(10.0)).first_rank for _ in range(3)] == [0, 1, 2]
            sock.sendall(framed(JoinNode(options=SECOND)) + bytes(Seal.BYTES))
            with pytest.raises(CodecError, match="proved its key"):
                core.receive(Deadline(10.0))


@pytest.mark.parametrize("attack", ["changed", "repeated", "left out", "sent back", "another session"])
def test_no_relay_can_say_anything_of_its_own(attack: str) -> None:
    """The one that passes both proofs on holds both connections; each message has its session, direction and number."""
    seal, other_seal = (Proofs(KEY, PeerClaims.of(ASKED).encode(), PeerClaims.of(SECOND).encode()) for _ in range(2))
    core = seal.seal(b"core", b"node")
    receives = seal.seal(b"node", b"core")
    first, second = framed(RunNode(first_rank=1, num_ranks=1)), framed(RunNode(first_rank=2, num_ranks=1))
    sealed = [data + core.sent(data[_LENGTH.size :]) for data in (first, second)]
    sent = {
        "changed": [second[: len(second)] + sealed[0][len(first) :]],
        "repeated": [sealed[0], sealed[0]],
        "left out": [sealed[1]],
        "sent back": [first + receives.sent(first[_LENGTH.size :])],
        "another session": [first + other_seal.seal(b"core", b"node").sent(first[_LENGTH.size :])],
    }[attack]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(sent))
        node = Channel(ours, RunNode, seal.seal(b"node", b"core"))
        for _ in sent[1:]:
            node.receive(Deadline(5.0))
        with pytest.raises(CodecError, match="a message was changed on its way"):
            node.receive(Deadline(5.0))


@pytest.mark.parametrize(
    "change",
    [
        {"node_rank": 2},
        {"nnodes": 3},
        {"schema_hash": "0" * 16},
        {"version": "0.0"},
        {"nonce": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_proof_is_of_no_use_beside_other_facts(change: dict[str, Any]) -> None:
    core, node = PeerClaims.of(ASKED), PeerClaims.of(SECOND)
    proofs = Proofs(KEY, core.encode(), node.encode())
    for others in (
        Proofs(KEY, core.encode(), replace(node, **change).encode()),
        Proofs(KEY, replace(core, **change).encode(), node.encode()),
        Proofs(KEY + "x", core.encode(), node.encode()),
    ):
        assert {proofs.of(b"core"), proofs.of(b"node")}.isdisjoint({others.of(b"core"), others.of(b"node")})
    assert proofs.of(b"core") != proofs.of(b"node")


def test_a_node_without_the_key_learns_nothing_to_guess_it_with() -> None:
    with join_at(ASKED) as joined, joined.connect() as sock:
        sock.sendall(PeerClaims.of(SECOND).encode())
        _read(sock, HELLO_BYTES)
        sock.sendall(os.urandom(PROOF_BYTES))
        assert _read(sock, PROOF_BYTES) == REFUSED
        assert sock.recv(1) == b""
        with pytest.raises(EngineStartError, match=f"the node's {KEY_VARIABLE} is not the engine core's"):
            joined.join(SECOND, key="another")
        assert not joined.members


STRANGERS: dict[str, Callable[[socket.socket], object]] = {
    "idle": lambda sock: None,
    "half a hello": lambda sock: sock.sendall(PeerClaims.of(SECOND).encode()[:-1]),
    "a hello and no proof": lambda sock: sock.sendall(PeerClaims.of(SECOND).encode()),
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100),
    "half closed": lambda sock: sock.shutdown(socket.SHUT_WR),
}


@pytest.mark.parametrize("how", STRANGERS)
def test_a_node_joins_beside_strangers(how: str) -> None:
    with join_at(ASKED) as joined:
        strangers = [joined.connect() for _ in range(3 * MOST_STRANGERS)]
        try:
            for sock in strangers:
                with suppress(OSError):  # it was dropped already
                    STRANGERS[how](sock)
            joined.join(SECOND, deadline_s=5.0)[0].close()
            assert len(joined.port._strangers) <= MOST_STRANGERS
        finally:
            for sock in strangers:
                sock.close()


def test_a_slow_stranger_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it sends: the time is for the whole proof."""
    monkeypatch.setattr(join_port, "PROOF_WITHIN_S", 0.3)
    with join_at(ASKED) as joined, joined.connect() as sock:
        began_s = time.monotonic()
        data = iter(PeerClaims.of(SECOND).encode())

        def is_dropped() -> bool:
            try:
                sock.sendall(bytes([next(data)]))
                sock.settimeout(0.05)
                return sock.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_dropped, 20.0, "the end of the slow connection")
        assert time.monotonic() - began_s >= 0.3
        assert not joined.port._strangers


def test_a_flood_of_connections_neither_ends_the_port_nor_keeps_nodes_out() -> None:
    with join_at(ASKED) as joined:
        for _ in range(10_000):
            with suppress(OSError):
                sock = socket.create_connection(joined.address, timeout=10.0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT
                sock.close()
        joined.join(SECOND, deadline_s=10.0)[0].close()
        assert len(joined.port._strangers) <= MOST_STRANGERS


def test_the_port_survives_a_lack_of_descriptors() -> None:
    """It once ended without a word, at the first connection that it could not accept."""
    with join_at(ASKED) as joined:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        ours = [socket.socket() for _ in range(4)]
        held: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for sock in ours:
                sock.connect(joined.address)
            ours[0].settimeout(1.0)
            with suppress(OSError):
                ours[0].recv(1)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for sock in ours:
                sock.close()
        joined.join(SECOND, deadline_s=10.0)[0].close()


def test_another_address_keeps_its_turn_beside_a_full_one() -> None:
    with join_at(ASKED) as joined, ExitStack() as open_until_the_end:
        patient = socket.create_connection(joined.address, source_address=("127.0.0.2", 0), timeout=10.0)
        open_until_the_end.enter_context(patient)
        patient.sendall(PeerClaims.of(SECOND).encode())
        _read(patient, HELLO_BYTES)
        for _ in range(2 * MOST_STRANGERS):
            open_until_the_end.enter_context(joined.connect())
        joined.join(SECOND)[0].close()
        patient.sendall(bytes(PROOF_BYTES))
        assert _read(patient, PROOF_BYTES) == REFUSED, "it is still heard"


def test_nobody_listens_any_more_once_the_port_is_closed() -> None:
    with join_at(ASKED) as joined:
        address = joined.address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=1.0)


def test_three_idle_connections_do_not_keep_the_real_node_out() -> None:
    asked = on_two_nodes(options())
    executor = MultiNodeExecutor(asked)
    idle = [socket.create_connection(executor.address) for _ in range(3)]
    node = start_node(executor.address[1], *null_flags(asked))
    try:
        wait_until(lambda: 1 in executor._nodes, 60.0, "the node's joining")
    finally:
        executor.stop()
        for sock in idle:
            sock.close()
        node.kill()
        node.communicate()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_cls", "evil_rank:EvilRank"),
        ("worker_extension_cls", "evil_rank:EvilRank"),
        ("model", "another"),
        ("trust_remote_code", True),
        ("hf_overrides", {"architectures": ["Evil"]}),
        ("distributed_executor_backend", "evil:Executor"),
        ("load_format", "dummy"),
    ],
)
def test_options_that_differ_are_named_to_both(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked = on_two_nodes(options(), master_port=0)
    executor = MultiNodeExecutor(asked)
    other = msgspec.structs.replace(asked, node_rank=1, **{name: value})
    try:
        sock = socket.create_connection(executor.address, timeout=10.0)
        with sock:
            channel = Channel(sock, Any, prove_to_core(sock, other, cluster_key(other), Deadline(10.0)))
            channel.send(JoinNode(options=other))
            answer = str(channel.receive(Deadline(10.0)))
            assert f"{name} is " in answer
            assert "at the engine core" in answer
        wait_until(lambda: f"refused: {name} is " in caplog.text, 5.0, "the core's line")
    finally:
        executor.stop()


def test_a_node_elsewhere_wants_a_key_too() -> None:
    with pytest.raises(OptionError, match=f"set {KEY_VARIABLE} to the same secret"):
        cluster_key(msgspec.structs.replace(SECOND, master_addr="10.1.2.3"))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_a_host_alone_has_a_key_that_no_other_user_reads(address: str, runtime_directory: Path) -> None:
    asked = msgspec.structs.replace(SECOND, master_addr=address)
    before = os.umask(0)
    try:
        key = cluster_key(asked)
    finally:
        os.umask(before)
    assert len(key) == 64
    assert key == cluster_key(asked)
    (file,) = runtime_directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_core_of_another_version_is_named_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_at(ASKED) as joined:
        made = PeerClaims.of
        monkeypatch.setattr(PeerClaims, "of", lambda asked: replace(made(asked), schema_hash=f"{asked.node_rank}" * 16))
        with pytest.raises(OptionError, match=r"runs headrace .* with message schema 0000.* and the node .* with 1111"):
            joined.join(SECOND)


def test_a_listener_that_is_no_core_is_not_waited_for_beyond_the_time() -> None:
    leader = Leader(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(HELLO_BYTES)))
    with (
        socket.create_connection(("127.0.0.1", leader.port)) as sock,
        pytest.raises(NoProofError, match="not the greeting of a node"),
    ):
        prove_to_core(sock, SECOND, KEY, Deadline(10.0))
    leader.listener.close()


def test_a_node_whose_message_cannot_be_handled_is_lost_by_name() -> None:
    """A step would wait for it until its time-out."""
    ours, theirs = Channel.pair(FromNode)
    other = Channel(theirs, FromNode)
    heard: list[Message] = []

    def hear(message: Message) -> None:
        heard.append(message)
        if len(heard) == 1:
            raise KeyError("no such worker")

    node = RemoteNode(1, ours, "there", hear)
    other.send(Progress(phase="load", seconds=0.0))
    wait_until(lambda: len(heard) == 2, 20, "the loss to be told")
    assert isinstance(heard[1], ChildFailed)
    assert "node 1 at there is lost" in heard[1].failure.message
    node.close()
    other.close()
