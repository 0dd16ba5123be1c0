"""The port on the core's side: clients that do not read, and what was sent by those that left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from engine_parts import make_plan, welcome_of
from patience import wait_until
from wire_client import WireClient

from headrace.core.engine import zmq_port
from headrace.core.engine.memory_port import MemoryPort
from headrace.core.engine.sessions import FAR_BEHIND, ClientGone, Inbox, Sessions
from headrace.core.engine.zmq_port import MAX_BURST_MESSAGES, ZmqPort
from headrace.core.options.engine_options import Options
from headrace.core.process.daemon import new_port
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.codec import Tensor
from headrace.ipc.control import CallExtension
from headrace.ipc.failure import EngineDeadError, InvalidRequestError
from headrace.ipc.messages import (
    SCHEMA_HASH,
    Abort,
    AddRequest,
    ClientMessage,
    Control,
    Dismissed,
    Draining,
    FetchTokenizer,
    Generate,
    GetStats,
    Hello,
    Load,
    Refused,
    Reply,
    Sampling,
    StepOutputs,
    TokenizerBundle,
    Welcome,
)
from headrace.ipc.transport import sockets

BIG, NOTHING = Tensor.of("int32", [7] * 200_000), Tensor.of("int32", [])


class Port:
    """A port that is served by nobody but the test."""

    def __init__(self, tokenizer: TokenizerBundle | None = None, **limits: int) -> None:
        self.inbox, self.port = Inbox(), ZmqPort("", **limits)
        self.port.serve(Sessions(self.inbox, welcome_of(*make_plan()), tokenizer))

    def wait_for(self, *clients: int) -> None:
        """A client may have its Welcome before the port has noted it."""
        wait_until(lambda: self.port.clients == [*clients], 30, "the port knows its clients")

    def fill(self, client: int) -> None:
        """Sends until the client is given up."""
        self.wait_for(client)
        for _ in range(1000):
            self.port.send(client, StepOutputs(step=1, slots=BIG, token_ids=BIG))
            if client not in self.port.clients:
                return
        raise AssertionError("the client was never given up")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(sockets, "QUEUE_MESSAGES", 2)
    port = Port()
    yield port
    port.port.close()


def test_a_client_that_does_not_read_is_dismissed_and_hears_why(port: Port) -> None:
    with WireClient(port.port.address) as client:
        port.fill(1)
        assert port.inbox.get(timeout=60) == (1, ClientGone())
        dismissed = client.receive(Dismissed)
        assert "did not read its answers" in dismissed.failure.message


def test_a_dismissed_clients_requests_end_with_the_cause_and_its_connection_closes(port: Port) -> None:
    async def main() -> None:
        transport = ZmqTransport(port.port.address)
        client = CoreClient(transport)
        await client.start()
        stats = asyncio.ensure_future(client.get_stats())
        await asyncio.sleep(0)
        port.fill(1)  # this thread is the client's: it cannot read meanwhile
        with pytest.raises(EngineDeadError, match="did not read its answers"):
            await asyncio.wait_for(stats, 20)
        assert transport._context is None

    asyncio.run(main())


def test_what_a_client_sent_before_it_could_know_that_it_is_gone_is_no_message_before_hello(port: Port) -> None:
    with WireClient(port.port.address) as client:
        port.fill(1)
        client.add(1, [5, 6])
        client.send(Abort(slots=(1,)))
        client.receive(Dismissed)
        assert not [message for message in client.heard if isinstance(message, Refused)]
    with WireClient(port.port.address, greet=False) as stranger:
        stranger.send(Abort(slots=(1,)))
        assert "Abort before Hello" in stranger.receive(Refused).failure.message


def test_a_busy_port_still_probes_its_clients(port: Port) -> None:
    with WireClient(port.port.address) as client:
        port.port.set_load(Load(num_running=1, num_waiting=0), frozenset({1}))
        client.receive(Load)


def test_messages_that_the_loop_cannot_take_yet_come_slowly_beside_requests_that_run(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is the loop's first: it gets no more of them for it."""
    pauses: list[float] = []
    monkeypatch.setattr(zmq_port, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    sent = FAR_BEHIND + 20 * MAX_BURST_MESSAGES
    with WireClient(port.port.address) as client:

        def flood() -> int:
            """How often the port paused until all had come."""
            pauses.clear()
            for slot in range(sent):
                client.send(Abort(slots=(slot,)))
            wait_until(lambda: port.inbox.qsize() == sent, 30, "the port takes all")
            while not port.inbox.empty():
                port.inbox.get()
            return len(pauses)

        assert flood() == 0, "nothing runs that it would disturb"
        port.port.set_load(Load(num_running=1, num_waiting=0), frozenset({1}))
        client.receive(Load)
        assert flood() >= 15


def test_how_much_one_client_may_leave_unread_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "QUEUE_MESSAGES", 2)  # of the client's side

    def sent_before_dismissal(**options: Any) -> int:
        port = new_port(Options(**options), "")
        try:
            port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
            with WireClient(port.address):
                wait_until(lambda: port.clients == [1], 30, "the port knows its client")
                for count in range(2000):
                    port.send(1, StepOutputs(step=1, slots=BIG, token_ids=BIG))
                    if not port.clients:
                        return count
                raise AssertionError("the client was never given up")
        finally:
            port.close()

    few, more = (sent_before_dismissal(max_client_unread_messages=most) for most in (1, 100))
    assert few + 90 < more < few + 110


def test_what_a_client_leaves_unread_is_bounded_in_bytes_and_one_that_reads_has_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tokenizer of megabytes is asked for in a few bytes."""
    monkeypatch.setattr(sockets, "QUEUE_MESSAGES", 2)  # of the client, whose memory does not count
    bundle = TokenizerBundle(tokenizer_json=bytes(1 << 20))
    port = Port(bundle, unread_messages=100_000, unread_bytes=8 << 20)
    try:
        with WireClient(port.port.address) as reads, WireClient(port.port.address) as leaves:
            for call in range(40):
                reads.send(FetchTokenizer(call=call))
                assert reads.receive(Reply).result == bundle
            for call in range(40):
                leaves.send(FetchTokenizer(call=call))
            assert port.inbox.get(timeout=60) == (2, ClientGone())
            leaves.receive(Dismissed)
            assert len(leaves.heard) < 25
            reads.send(FetchTokenizer(call=41))
            assert reads.receive(Reply).call == 41
    finally:
        port.port.close()


def test_a_client_that_has_read_is_not_dismissed_because_that_is_reported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of pyzmq's reports it, which on a busy machine runs late."""
    monkeypatch.setattr(zmq_port, "DONE_WITHIN_S", 60.0)
    was_read = threading.Event()
    port = Port(unread_bytes=len(BIG.data))
    try:
        with WireClient(port.port.address) as client:
            port.wait_for(1)
            unread = zmq_port._Unread()
            unread._sent.append((len(BIG.data), [zmq.MessageTracker(was_read)]))
            unread._bytes = len(BIG.data)
            (identity,) = port.port._client_of
            port.port._unread[identity] = unread
            report = threading.Timer(0.05, was_read.set)
            report.start()
            port.port.send(1, StepOutputs(step=1, slots=BIG, token_ids=NOTHING))
            report.join()
            assert client.receive(StepOutputs).slots == BIG
    finally:
        port.port.close()


class TurnsTaken:
    """A lock after whose release the port's thread waits until the loop has sent something."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._loop = lock, threading.get_ident()
        self.sent, self.has_ended = threading.Semaphore(0), False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if threading.get_ident() != self._loop and not self.has_ended:
            self.sent.acquire(timeout=1)


def test_a_message_of_very_many_frames_is_refused_and_the_loop_sends_meanwhile(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noting(sock: zmq.Socket[bytes]) -> bool:
        sent_before.append(sent)
        return sockets.drop_frames(sock)

    sent_before = list[int]()
    monkeypatch.setattr(zmq_port, "drop_frames", noting)
    with WireClient(port.port.address) as victim, WireClient(port.port.address) as client:
        port.wait_for(1, 2)
        client.socket.setsockopt(zmq.SNDHWM, 0)
        for _ in range(10_000):
            client.socket.send(b"x", zmq.SNDMORE)
        sent = 0
        port.port._socket_lock = turns = TurnsTaken(port.port._socket_lock)  # type: ignore[assignment]
        client.socket.send(b"x")
        while not client.socket.poll(0):
            port.port.send(1, Load(num_running=1, num_waiting=0))
            turns.sent.release()
            sent += 1
            victim.receive(Load)
        turns.has_ended = True
        assert sent_before[-1] > sent_before[0] + 3, "the loop has waited for the port's thread"
        assert f"more than {sockets.MOST_FRAMES} frames" in client.receive(Refused).failure.message
        client.add(1, [5, 6])
        assert port.inbox.get(timeout=60)[1].slot == 1  # type: ignore[union-attr]


def test_a_message_that_would_take_long_to_read_is_refused_and_its_sender_is_told_before(port: Port) -> None:
    with WireClient(port.port.address) as client:
        client.socket.send(b"\xdd" + sockets.MOST_HEADER_BYTES.to_bytes(4, "big") + b"\5" * sockets.MOST_HEADER_BYTES)
        assert "at most 16777216 are taken" in client.receive(Refused).failure.message

    async def main() -> None:
        client = CoreClient(ZmqTransport(port.port.address))
        await client.start()
        with pytest.raises(InvalidRequestError, match=r"a message of 2\d+ bytes; the engine takes at most 16777216"):
            await client.call_extension({"weights": bytes(20 << 20)})
        await client.close()

    asyncio.run(main())


def test_a_call_that_finds_the_inbox_full_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(Inbox(max_client_bytes=600), welcome_of(*make_plan()), None)
    assert sessions.receive(1, GetStats(call=1)) is None
    answer = sessions.receive(1, GetStats(call=2))
    assert isinstance(answer, Reply)
    assert answer.call == 2
    assert answer.failure is not None
    assert "too much on its way" in answer.failure.message


@pytest.mark.parametrize(
    "message",
    [
        Control(call=1, command=CallExtension(payload={"many": [0] * 100_000})),
        AddRequest(
            slot=1,
            request_id="r",
            prompt_token_ids=Tensor.of("int32", [5]),
            task=Generate(sampling=Sampling(max_tokens=1, extra_args={"many": [0] * 100_000})),
        ),
        Abort(slots=tuple(range(100_000))),
    ],
    ids=["a payload", "arguments", "slots"],
)
def test_whatever_a_message_holds_counts_for_what_its_client_may_have_in_the_inbox(message: ClientMessage) -> None:
    inbox = Inbox(max_client_bytes=3_000_000)
    taken = 0
    while inbox.offer(1, message):
        taken += 1
        assert taken < 10
    inbox.get()
    assert inbox.offer(1, message)


class Slow(Sessions):
    """Answers a Hello when the test says so."""

    def __init__(self) -> None:
        super().__init__(Inbox(), welcome_of(*make_plan()), None)
        self.greets, self.may_answer = threading.Event(), threading.Event()

    def greet(self, hello: Hello) -> Any:
        answer = super().greet(hello)
        self.greets.set()
        self.may_answer.wait(30)
        return answer


@pytest.mark.parametrize("over", ["zmq", "memory"])
def test_a_client_that_is_being_welcomed_hears_what_all_are_told(over: str) -> None:
    """Two clients: one whose Welcome is under way as other weights are loaded, and one that comes as the engine
    drains."""
    sessions, hello = Slow(), Hello(schema_hash=SCHEMA_HASH, version="test", pid=1)
    port = MemoryPort() if over == "memory" else ZmqPort("")
    port.serve(sessions)
    with ExitStack() as stack:
        stack.callback(port.close)

        def heard_by_new_client() -> Callable[[], list[type]]:
            if isinstance(port, MemoryPort):
                heard: list[Any] = []
                threading.Thread(target=port.open, args=(hello, heard.append)).start()
                return lambda: [type(each) for each in heard]
            client = stack.enter_context(WireClient(port.address, greet=False))
            client.send(hello)

            def receive() -> list[type]:
                while client.socket.poll(10):
                    client.receive(object)  # type: ignore[type-abstract]
                return [type(each) for each in client.heard]

            return receive

        first = heard_by_new_client()
        assert sessions.greets.wait(30)
        sessions.welcome = msgspec.structs.replace(sessions.welcome, model_version="other weights")
        telling = threading.Thread(target=port.send_all, args=(sessions.welcome,))
        telling.start()
        telling.join(0.1)
        sessions.may_answer.set()
        wait_until(lambda: first() == [Welcome, Welcome], 30, "the changed Welcome")
        telling.join(30)
        port.send_all(Draining(deadline_s=1.0))
        wait_until(lambda: first() == [Welcome, Welcome, Draining], 30, "Draining")
        later = heard_by_new_client()
        wait_until(lambda: later() == [Welcome, Draining], 30, "Draining after the later Welcome")
