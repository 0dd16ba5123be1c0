"""Whoever completes a port's handshake without keys, and then says nothing of use, does not keep its connection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import zmq
from engine_parts import make_plan, welcome_of
from patience import wait_until
from wire_client import WireClient

from headrace.core.coordinator.program import Coordinator
from headrace.core.engine.sessions import Inbox, Sessions
from headrace.core.engine.zmq_port import ZmqPort
from headrace.ipc.codec import Codec
from headrace.ipc.coordination import SCHEMA_HASH, Follow, FromCoordinator
from headrace.ipc.messages import ClientMessage, FetchTokenizer, Reply
from headrace.ipc.transport import strangers

ADDRESSES = ("tcp://127.0.0.1:*", "")


@contextlib.contextmanager
def port(address: str) -> Iterator[ZmqPort]:
    running = ZmqPort(address)
    running.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
    try:
        yield running
    finally:
        running.close()


class Stranger:
    """Speaks ZeroMQ, and says what it is given."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *messages: object) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)
        assert self._monitor.poll(20_000), "it is let in"
        self._monitor.recv_multipart()
        codec: Codec[ClientMessage] = Codec(ClientMessage)
        for message in messages:
            self.socket.send_multipart(codec.encode(message))

    @property
    def is_cut(self) -> bool:
        return bool(self._monitor.poll(0))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_stranger_is_let_go_in_time_and_a_client_is_not(
    address: str, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "INTRODUCED_WITHIN_S", 1.0)
    with port(address) as engine:
        client = WireClient(engine.address)
        said = [(), (FetchTokenizer(call=1),)]
        let_in = [Stranger(context, engine.address, *messages) for messages in said]
        wait_until(lambda: all(each.is_cut for each in let_in), 60, "they are let go")
        client.send(FetchTokenizer(call=2))
        assert client.receive(Reply).call == 2
        client.close()


def test_only_so_many_strangers_are_let_in(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "most_strangers", lambda: 3)
    monkeypatch.setattr(strangers, "INTRODUCED_WITHIN_S", 3600.0)
    with port("tcp://127.0.0.1:*") as engine:
        let_in = [Stranger(context, engine.address) for _ in range(5)]
        wait_until(lambda: [each.is_cut for each in let_in] == [True] * 2 + [False] * 3, 60, "the oldest go")


def test_a_coordinator_lets_strangers_go_and_keeps_who_follows_it(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "INTRODUCED_WITHIN_S", 1.0)
    running = Coordinator("tcp://127.0.0.1:*")
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        follower = Stranger(context, running.address)
        codec: Codec[FromCoordinator] = Codec(FromCoordinator)
        follower.socket.send_multipart(codec.encode(Follow(schema_hash=SCHEMA_HASH, needs_all=True)))
        assert follower.socket.poll(20_000), "it has its answer"
        stranger = Stranger(context, running.address)
        wait_until(lambda: stranger.is_cut, 60, "it is let go")
        assert not follower.is_cut
    finally:
        running.stop()
        thread.join()
        running.close()
