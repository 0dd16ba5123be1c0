"""What an engine says when its coordinator does not hear it, and a coordinator to those who take it for an engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_parts import make_plan, welcome_of
from patience import wait_until
from thinned import every

from headrace import LLM
from headrace.core.coordinator.announcer import AnnouncedState, Announcer
from headrace.core.coordinator.program import Coordinator
from headrace.core.coordinator.registry import Outgoing, Registry
from headrace.core.engine.engine import EngineCore
from headrace.core.engine.sessions import Inbox, Sessions
from headrace.core.engine.zmq_port import ZmqPort
from headrace.core.options.parsing import parse_options
from headrace.frontend.client.transport import Transport
from headrace.frontend.fleet import discovery
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.sources import Source
from headrace.ipc.codec import Codec
from headrace.ipc.coordination import (
    SCHEMA_HASH,
    Announce,
    Denied,
    Ended,
    EngineEntry,
    Follow,
    FromCoordinator,
    Unfollow,
    Withdraw,
    signed,
)
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import Load
from headrace.ipc.transport.hosts import listening
from headrace.ipc.transport.keys import VARIABLE, add_client, make_key_file, read_keys
from headrace.ipc.transport.sockets import new_dealer

ENTRY = EngineEntry(
    address="tcp://127.0.0.1:9",
    life="1",
    model="m",
    served_model_names=("m",),
    rank=0,
    host="here",
    pid=1,
    max_num_seqs=1,
    max_waiting_requests=1,
    block_size=16,
)


@contextmanager
def coordinator(address: str = "tcp://127.0.0.1:*") -> Iterator[Coordinator]:
    running = Coordinator(address)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join()
        running.close()


def idle() -> AnnouncedState:
    return AnnouncedState(Load(num_running=0, num_waiting=0))


@contextmanager
def announcer(address: str, state: Callable[[], AnnouncedState] = idle) -> Iterator[None]:
    running = Announcer(ENTRY, [address], state, patience_s=0.05)
    running.start()
    try:
        yield
    finally:
        running.close()


def test_an_engine_says_once_that_its_coordinator_is_not_there_and_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as gone:
        address = gone.address
    with caplog.at_level(logging.WARNING), announcer(address):
        wait_until(lambda: f"no coordinator listens at {address}; this engine" in caplog.text, 30, "the warning")
        with coordinator(address) as back:
            wait_until(lambda: bool(list(back.registry.addresses)), 20, "the engine to be known")
            wait_until(lambda: f"the coordinator at {address} is connected" in caplog.text, 30, "the good news")
    assert caplog.text.count("no coordinator listens") == 1


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_engine_finds_its_coordinator_at_either_address_of_localhost(host: str, is_first: bool, ipv6: None) -> None:
    """Also one that comes later."""
    with listening(host, 0) as sock:
        port = sock.getsockname()[1]
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(coordinator(f"tcp://{host}:{port}"))] if is_first else []
        stack.enter_context(announcer(f"tcp://localhost:{port}"))
        found = found or [stack.enter_context(coordinator(f"tcp://{host}:{port}"))]
        wait_until(lambda: bool(list(found[0].registry.addresses)), 30, "the engine to be known")


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_is_announced_as_soon_as_it_is_connected(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it or its coordinator comes first: what was announced before that is lost."""
    monkeypatch.setattr("headrace.core.coordinator.announcer.ANNOUNCE_EVERY_S", 1e4)
    with coordinator() as before:
        address = before.address
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(coordinator(address))] if is_first else []
        stack.enter_context(announcer(address))
        found = found or [stack.enter_context(coordinator(address))]
        wait_until(lambda: bool(list(found[0].registry.addresses)), 30, "the engine to be known")


def test_an_engine_that_once_cannot_be_announced_is_announced_later(caplog: pytest.LogCaptureFixture) -> None:
    states = iter([None, idle()])
    with coordinator() as found, announcer(found.address, lambda: next(states, idle())):  # type: ignore[return-value]
        wait_until(lambda: ENTRY.address in found.registry.addresses, 30, "the engine to be known")
    assert "could not be announced" in caplog.text


def test_an_engine_is_announced_once_its_parent_knows_that_it_is_ready() -> None:
    """Else clients could use it, and lose their requests to a parent that still takes its start for failed."""
    with coordinator() as found:
        null = "headrace.executor.testing.null:NullExecutor"
        options = parse_options(model="null", distributed_executor_backend=null, coordinator=(found.address,))
        core = EngineCore(options, ZmqPort(""))
        core.start(lambda name, seconds: None)
        known: list[set[str]] = []

        def on_ready() -> None:
            with announcer(found.address):  # what another engine says now is heard after what this one has said
                wait_until(lambda: ENTRY.address in found.registry.addresses, 30, "the other engine to be known")
                known.append(set(found.registry.addresses))

        try:
            core.announce(options.coordinator, on_ready)
            wait_until(lambda: core.port.address in found.registry.addresses, 30, "the engine to be known")
        finally:
            core.stop()
            core.close()
    assert known == [{ENTRY.address}]


def test_an_engine_says_that_its_coordinator_has_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ours", "theirs"):
        make_key_file(tmp_path / name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    with coordinator() as other:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "ours"))
        with caplog.at_level(logging.WARNING), announcer(other.address):
            said = f"or has other keys than {tmp_path / 'ours'}, or none; this engine"
            wait_until(lambda: said in caplog.text, 30, "the warning")
        assert not list(other.registry.addresses)


def test_an_engine_and_a_coordinator_are_not_taken_for_each_other(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as running, pytest.raises(EngineDeadError, match="is no engine-core of this version"):
        LLM.connect(running.address, timeout_s=60)
    port = ZmqPort("tcp://127.0.0.1:*")
    try:
        port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
        with caplog.at_level(logging.WARNING), announcer(port.address):
            said = f"what listens at {port.address} is no coordinator of this version; this engine"
            wait_until(lambda: said in caplog.text, 30, "the warning")
    finally:
        port.close()


@contextmanager
def client_of(address: str, keys: Path | None = None) -> Iterator[Callable[[Any], Any]]:
    """Sends a message to the coordinator, and returns its answer to it or, where there is none, to a Follow."""
    codec: Codec[Any] = Codec(FromCoordinator)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = new_dealer(context, address, keys_path=keys)
    sock.connect(address)

    def ask(message: Any) -> Any:
        for each in (message, Follow(schema_hash=SCHEMA_HASH, needs_all=True)):
            sock.send_multipart(codec.encode(each))
        assert sock.poll(20_000), "an answer"
        return codec.decode(sock.recv_multipart())

    try:
        yield ask
    finally:
        sock.close(0)
        context.term()


def forged(what: str) -> Announce | Withdraw:
    if what == "withdrawn":
        return Withdraw(address=ENTRY.address, life=ENTRY.life)
    life, pid, address = {
        "replaced": ("2", ENTRY.pid, ENTRY.address),
        "changed": (ENTRY.life, 2, ENTRY.address),
        "added": ("2", ENTRY.pid, "tcp://127.0.0.1:10"),
    }[what]
    entry = msgspec.structs.replace(ENTRY, life=life, pid=pid, address=address)
    return Announce(schema_hash=SCHEMA_HASH, entry=entry, number=1 << 20)


@pytest.mark.parametrize("proof", every(3, [b"", b"?" * 32, "of another key"]), ids=["none", "guessed", "other key"])
@pytest.mark.parametrize("what", ["withdrawn", "replaced", "changed", "added"])
def test_a_client_may_follow_and_says_nothing_of_engines(
    what: str, proof: bytes | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a client's key file is admitted, and once could remove an engine for good."""
    engines, client = tmp_path / "engines", tmp_path / "client"
    make_key_file(engines)
    add_client(engines, "reader", client)
    monkeypatch.setenv(VARIABLE, str(engines))
    with coordinator() as running:
        with announcer(running.address):
            wait_until(lambda: list(running.registry.entries) == [ENTRY], 20, "the engine to be known")
            message: Any = forged(what)
            if isinstance(proof, bytes):
                message = msgspec.structs.replace(message, proof=proof)
            else:
                message = signed(message, read_keys(client).client.secret_key)
            with client_of(running.address, client) as ask:
                denied = ask(message)
                assert isinstance(denied, Denied)
                assert "only holders of the engines' secret key" in denied.why
            assert running.registry.entries == [ENTRY]
            assert running.registry.num_changes == 1
            with client_of(running.address, client) as ask:
                (listed,) = ask(Unfollow()).listed
                assert listed.entry == ENTRY
        wait_until(lambda: running.registry.entries == [], 20, "the engine itself to leave")


ANNOUNCED = Announce(schema_hash=SCHEMA_HASH, entry=ENTRY, number=1)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (msgspec.structs.replace(ANNOUNCED, num_running=1 << 40), "num_running"),
        (msgspec.structs.replace(ANNOUNCED, num_waiting=-(1 << 40)), "num_waiting"),
        (msgspec.structs.replace(ANNOUNCED, entry=msgspec.structs.replace(ENTRY, rank=-1)), "rank"),
        (Follow(schema_hash=SCHEMA_HASH, lease_s=float("nan")), "lease_s"),
        (Withdraw(address="x" * 5000, life="1"), "address"),
    ],
)
def test_a_message_out_of_range_is_refused_by_name_and_ends_no_coordinator(message: Any, field: str) -> None:
    """What an engine says of its load goes to all frontends as 32-bit numbers."""
    with coordinator() as running:
        with client_of(running.address) as ask:
            denied = ask(message)
            assert isinstance(denied, Denied)
            assert field in denied.why
        with announcer(running.address):
            wait_until(lambda: list(running.registry.entries) == [ENTRY], 20, "another engine to be known")


def test_coordinators_are_asked_again_after_one_could_not_be_and_names_are_found_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where no more files may be open, or a key file is away for a moment."""
    resolving: list[threading.Thread] = []

    def is_ipv6(address: str) -> bool:
        resolving.append(threading.current_thread())
        return False

    monkeypatch.setattr(discovery, "is_ipv6", is_ipv6)
    found: list[str] = []

    class Fleet:
        def add(self, source: Source, rank: int | None = None) -> None:
            found.append(source.address)

    class Flaky(Discovery):
        num_calls = 0

        def _dial(self, address: str) -> Transport:
            self.num_calls += 1
            if self.num_calls == 1:
                raise OSError("Too many open files")
            return super()._dial(address)

    async def main(address: str) -> None:
        following = Flaky([address])
        following.start(Fleet())  # type: ignore[arg-type]
        while not found:
            await asyncio.sleep(0.01)
        await following.close()

    with coordinator() as running, announcer(running.address):
        asyncio.run(asyncio.wait_for(main(running.address), 30))
        assert f"{running.address} cannot be asked: Too many open files" in caplog.text
    assert found == [ENTRY.address]
    assert resolving
    assert threading.current_thread() not in resolving


def test_an_engine_with_a_clients_file_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines, client = tmp_path / "engines", tmp_path / "client"
    make_key_file(engines)
    add_client(engines, "reader", client)
    monkeypatch.setenv(VARIABLE, str(engines))
    with coordinator() as running:
        monkeypatch.setenv(VARIABLE, str(client))
        with announcer(running.address):
            wait_until(lambda: "start engines with the file that" in caplog.text, 20, "the engine to be told")
        assert not running.registry.entries


def test_an_engine_that_is_taken_for_gone_announces_itself_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Without keys a client can still say so: the engine was never seen again."""
    with coordinator() as running, announcer(running.address), client_of(running.address, None) as ask:
        wait_until(lambda: list(running.registry.entries) == [ENTRY], 20, "the engine to be known")
        ask(Withdraw(address=ENTRY.address, life=ENTRY.life))
        wait_until(lambda: [each.address for each in running.registry.entries] == [ENTRY.address], 20, "its return")
        (entry,) = running.registry.entries
        assert entry == msgspec.structs.replace(ENTRY, life=entry.life)
        assert entry.life != ENTRY.life
        assert "it is announced again" in caplog.text
    assert running.registry.entries == []


def test_a_life_that_another_one_has_replaced_is_not_told_to_come_back() -> None:
    """Else the two would end each other in turn."""
    registry, successor = Registry("epoch"), msgspec.structs.replace(ENTRY, life="2")
    first, second = (Announce(schema_hash=SCHEMA_HASH, entry=each, number=0) for each in (ENTRY, successor))
    registry.receive(b"a", first, 0.0)
    registry.receive(b"b", second, 1.0)
    assert registry.receive(b"a", msgspec.structs.replace(first, number=1), 2.0) == []
    registry.receive(b"b", Withdraw(address=ENTRY.address, life="2"), 3.0)
    (answer,) = registry.receive(b"a", msgspec.structs.replace(first, number=2), 4.0)
    assert answer == Outgoing((b"a",), Ended(address=ENTRY.address, life=ENTRY.life))
    assert registry.entries == []
