"""The wire itself: codec, schema hash, channel, addresses, failures."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_time import processor_s

from headrace.ipc import messages
from headrace.ipc.codec import INLINE_BYTES, Codec, CodecError, Tensor
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, InvalidRequestError
from headrace.ipc.messages import (
    AddRequest,
    ChildMessage,
    ClientMessage,
    CoreMessage,
    Finish,
    FinishReason,
    Generate,
    Hello,
    Progress,
    Sampling,
    StepOutputs,
)
from headrace.ipc.process.helper import Looking
from headrace.ipc.process.runtime_directory import AddressError, runtime_directory
from headrace.ipc.step import NewRow, StepPlan
from headrace.ipc.transport import sockets
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.transport.sockets import bind_router, check_address, new_ipc_address
from headrace.ipc.wait import Deadline, WaitTimeoutError, wait_readable

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32, max_size=400), st.text(), st.integers(0, 2**40), st.floats(allow_nan=False))
def test_a_request_arrives_as_it_was_sent(token_ids, request_id, slot, temperature):
    codec: Codec[ClientMessage] = Codec(ClientMessage)
    request = AddRequest(
        slot=slot,
        request_id=request_id,
        prompt_token_ids=Tensor.of("int32", token_ids),
        task=Generate(sampling=Sampling(max_tokens=3, temperature=temperature, stop_token_ids=(1, 2))),
    )
    frames = codec.encode(request)
    assert len(frames) == (2 if 4 * len(token_ids) > INLINE_BYTES else 1)
    received = codec.decode([bytes(frame) for frame in frames])
    assert received == request
    assert received.prompt_token_ids.tolist() == token_ids


def test_large_tensors_are_neither_copied_nor_parsed():
    codec: Codec[CoreMessage] = Codec(CoreMessage)
    slots = np.arange(INLINE_BYTES, dtype=np.int32)
    outputs = StepOutputs(step=1, slots=Tensor.from_numpy(slots), token_ids=Tensor.from_numpy(slots))
    frames = codec.encode(outputs)
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), slots)
    received = codec.decode(frames)
    assert np.shares_memory(received.slots.numpy(), slots)


def test_numpy_fields_cross_the_wire_as_arrays():
    codec: Codec[StepPlan] = Codec(StepPlan)
    new = NewRow(
        row=3,
        token_ids=np.arange(500, dtype=np.int32),
        num_prompt_tokens=500,
        num_computed_tokens=0,
        block_ids=np.arange(4, dtype=np.int32),
        task=Generate(sampling=Sampling(max_tokens=1)),
        seed=2**64 - 1,
    )
    empty = np.zeros(0, np.int32)
    plan = StepPlan(
        step=1,
        released_rows=empty,
        new_rows=(new,),
        block_tables=empty,
        block_ids=empty,
        rows=np.array([3], np.int32),
        num_tokens=np.array([500], np.int32),
        num_computed_tokens=np.array([0], np.int32),
        sampled=np.array([True]),
        total_tokens=500,
    )
    received = codec.decode([bytes(frame) for frame in codec.encode(plan)])
    assert np.array_equal(received.new_rows[0].token_ids, new.token_ids)
    assert received.new_rows[0].seed == 2**64 - 1
    assert received.sampled.dtype == bool


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_garbage_is_a_codec_error_and_nothing_else(frames):
    codec: Codec[ClientMessage] = Codec(ClientMessage)
    with pytest.raises(CodecError):
        codec.decode(frames)


@given(st.data())
def test_a_damaged_message_is_a_codec_error_or_a_message(data):
    codec: Codec[ClientMessage] = Codec(ClientMessage)
    request = AddRequest(
        slot=1,
        request_id="r",
        prompt_token_ids=Tensor.of("int32", range(300)),
        task=Generate(sampling=Sampling(max_tokens=3)),
    )
    frames = [bytearray(frame) for frame in codec.encode(request)]
    frame = data.draw(st.sampled_from(frames))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode([bytes(frame) for frame in frames])
    except CodecError:
        return


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "words"),
    [
        ("int32", (3,), b"\0" * 8, "needs 12 bytes, got 8"),
        ("int33", (1,), b"\0" * 4, "unknown dtype 'int33'"),
        ("int32", (-1, -1), b"\0" * 4, "needs 4 bytes"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(dtype, shape, data, words):
    with pytest.raises(CodecError, match=words):
        Tensor(dtype, shape, memoryview(data))


def test_a_tensor_that_names_a_missing_frame_is_refused():
    codec: Codec[ClientMessage] = Codec(ClientMessage)
    request = AddRequest(
        slot=1,
        request_id="r",
        prompt_token_ids=Tensor.of("int32", range(INLINE_BYTES)),
        task=Generate(sampling=Sampling(max_tokens=3)),
    )
    header, _ = codec.encode(request)
    with pytest.raises(CodecError, match="frame 1 of 1"):
        codec.decode([header])


def test_a_tensor_of_very_many_dimensions_is_refused_before_they_are_multiplied():
    """To multiply a hundred thousand sizes took more than two minutes, in which nobody else was served."""
    task = Generate(sampling=Sampling(max_tokens=1))
    tensor = ["int32", [2**63 - 1] * 100_000, b""]
    header = msgspec.msgpack.encode(["AddRequest", 1, "r", tensor, msgspec.to_builtins(task)])

    def refused() -> None:
        with pytest.raises(CodecError, match="100000 dimensions; at most 8 are taken"):
            Codec(ClientMessage).decode([header])

    assert processor_s(refused) < 5.0


def test_the_schema_hash_changes_with_any_field(monkeypatch):
    before = messages._schema_hash()
    assert before == messages.SCHEMA_HASH

    class Extended(messages.Message, tag="Abort"):
        slots: tuple[int, ...]
        reason: str = ""

    monkeypatch.setattr(messages, "ClientMessage", Hello | AddRequest | Extended)
    assert messages._schema_hash() != before


def test_a_finish_without_news_is_small():
    encoded = msgspec.msgpack.encode(Finish(slot=5, reason=FinishReason.LENGTH))
    assert len(encoded) < 64


def test_a_channel_carries_messages_and_notices_the_other_end_close():
    ours, theirs = Channel.pair(ChildMessage)
    child = Channel.inherited(theirs.detach(), ChildMessage)
    child.send(Progress(phase="load", seconds=1.5))
    assert ours.receive(Deadline(1.0)) == Progress(phase="load", seconds=1.5)
    child.close()
    with pytest.raises(ChannelClosedError):
        ours.receive(Deadline(1.0))
    with pytest.raises(ChannelClosedError):
        ours.send(Progress(phase="x", seconds=0.0))
    ours.close()


def test_a_channel_does_not_wait_beyond_its_deadline():
    ours, theirs = Channel.pair(ChildMessage)
    with pytest.raises(WaitTimeoutError, match=r"within 0\.1 s"):
        ours.receive(Deadline(0.1))
    ours.close()
    theirs.close()


class _CountingSocket(socket.socket):
    """Counts its reads and writes."""

    num_reads = num_writes = 0

    def recv(self, *arguments):
        self.num_reads += 1
        return super().recv(*arguments)

    def send(self, *arguments):
        self.num_writes += 1
        return super().send(*arguments)

    def settimeout(self, value):
        self.num_writes += 1  # a system call too
        super().settimeout(value)


def test_a_channel_takes_one_system_call_for_a_message_each_way():
    left, right = (_CountingSocket(fileno=each.detach()) for each in socket.socketpair())
    sends, receives = Channel(left, ChildMessage), Channel(right, ChildMessage)
    for number in range(3):
        sends.send(Progress(phase="load", seconds=number), Deadline(1.0))
        assert receives.receive(Deadline(1.0)).seconds == number
    assert (left.num_writes, right.num_reads) == (3, 3)
    sends.close()
    receives.close()


def test_messages_that_come_together_are_returned_in_turn():
    ours, theirs = Channel.pair(ChildMessage)
    child = Channel.inherited(theirs.detach(), ChildMessage)
    sent = [Progress(phase="x" * size, seconds=0.0) for size in (1, 70_000, 0, 65_532, 3, 100_000)]

    def send_all():
        for each in sent:
            child.send(each)

    writer = threading.Thread(target=send_all)
    writer.start()
    assert [ours.receive(Deadline(5.0)) for _ in sent] == sent
    writer.join()
    with pytest.raises(WaitTimeoutError):
        ours.receive(Deadline(0.0))
    ours.close()
    child.close()


def test_a_channel_that_does_not_read_ahead_leaves_later_messages_in_the_socket():
    """As in a helper program, whose workers wait for the socket after the program has read the beginning."""
    ours, theirs = Channel.pair(ChildMessage)
    child = Channel.inherited(theirs.detach(), ChildMessage, reads_ahead=False)
    sent = [Progress(phase=name, seconds=0.0) for name in ("beginning", "work")]
    for each in sent:
        ours.send(each)
    assert child.receive(Deadline(5.0)) == sent[0]
    wait_readable(child.fileno(), Deadline(5.0), what="work")
    assert Channel(socket.socket(fileno=os.dup(child.fileno())), ChildMessage).receive(Deadline(5.0)) == sent[1]
    ours.close()
    child.close()


def test_a_channel_is_looked_at_without_sleeping():
    ours, theirs = Channel.pair(ChildMessage)
    assert not ours.looks_for(0.001)
    child = Channel.inherited(theirs.detach(), ChildMessage)
    child.send(Progress(phase="load", seconds=1.5))
    assert ours.looks_for(60.0)
    assert ours.looks_for(0.0), "looking takes nothing away"
    assert ours.receive(Deadline(1.0)) == Progress(phase="load", seconds=1.5)
    child.close()
    assert ours.looks_for(60.0), "the end of file is worth waking up for"
    ours.close()


def test_who_looks_in_vain_sleeps_at_once_the_next_times():
    class Worker:
        num_looked, is_quick = 0, False

        def looks_for(self, seconds: float) -> bool:
            self.num_looked += 1
            return self.is_quick

    worker, looking = Worker(), Looking()
    for _ in range(1000):
        looking.look(worker)
    assert worker.num_looked < 30
    worker.is_quick, worker.num_looked = True, 0
    for _ in range(1000):
        looking.look(worker)
    assert worker.num_looked > 900


def test_a_channel_that_nobody_reads_says_so_at_the_deadline():
    ours, theirs = Channel.pair(ChildMessage)
    with pytest.raises(WaitTimeoutError, match=r"taking a message from the channel did not happen within 0\.1 s"):
        ours.send(Progress(phase="x" * 4_000_000, seconds=0.0), Deadline(0.1))
    ours.close()
    theirs.close()


def test_a_channel_refuses_an_absurd_length():
    left, right = socket.socketpair()
    channel = Channel.inherited(left.detach(), ChildMessage)
    right.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(CodecError, match="4294967295 bytes"):
        channel.receive(Deadline(1.0))
    channel.close()
    right.close()


@pytest.mark.parametrize(
    "address", ["ipc:///tmp/x.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://localhost:*"]
)
def test_local_addresses_are_accepted(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "is no address"),
        ("ipc://", "is no address"),
        ("127.0.0.1:5555", "is no address"),
        ("tcp://127.0.0.1", "is no address"),
        ("tcp://127.0.0.1:99999", "is no address"),
        ("tcp://0.0.0.0:5555", "no loopback address"),
        ("tcp://10.0.0.1:5555", "no loopback address"),
        ("tcp://example.com:5555", "no loopback address"),
    ],
)
def test_other_addresses_are_refused_with_the_forms_that_work(address, words):
    with pytest.raises(AddressError, match=words):
        check_address(address)


def test_the_runtime_directory_is_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "run"))
    path = runtime_directory()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(AddressError, match="mode 0700"):
        runtime_directory()


def test_a_path_too_long_for_a_socket_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / ("d" * 100)))
    with pytest.raises(AddressError, match="107 bytes"):
        new_ipc_address("engine")


def test_a_failure_keeps_its_origin_through_every_hand():
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        first = Failure.of(error, process="worker", phase="step", rank=3)
    again = Failure.of(EngineDeadError(failure=first), process="engine-core", phase="serve")
    assert again == first
    text = str(EngineDeadError.from_failure(again))
    assert text.startswith("by zero")
    assert f"worker rank 3 (pid {os.getpid()}), during step: ZeroDivisionError" in text
    assert "raise ZeroDivisionError" in text


def test_an_error_of_ours_is_a_sentence_without_a_traceback():
    with pytest.raises(HeadraceError) as caught:
        raise InvalidRequestError("temperature is -1; it must be 0 or more")
    assert Failure.of(caught.value, process="engine-core", phase="admission").traceback == ""


def test_a_socket_is_its_users_alone_from_its_beginning(tmp_path, monkeypatch):
    """Not only once its mode is changed: in between, others could connect."""
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    before = os.umask(0)
    context = zmq.Context()
    try:
        bind_router(context, f"ipc://{tmp_path}/engine.sock")
        assert stat.S_IMODE((tmp_path / "engine.sock").stat().st_mode) & 0o077 == 0
        assert os.umask(0) == 0
    finally:
        os.umask(before)
        context.destroy(linger=0)


def test_a_stranger_that_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 200)
    context = zmq.Context()
    try:
        _, address = bind_router(context, "tcp://127.0.0.1:*")
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
            stranger.settimeout(15)
            while stranger.recv(1024):  # its greeting, then the end
                pass
    finally:
        context.destroy(linger=0)
