"""Messages of several frames of which one cannot be sent, as where a process has used up its address space."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_parts import make_plan, welcome_of
from fake_core import zmq_core
from patience import wait_until
from source_tree import PYTHONPATH
from wire_client import WireClient

from headrace.core.engine.sessions import ClientGone, Inbox, Sessions
from headrace.core.engine.zmq_port import COUNTED_BYTES, ZmqPort
from headrace.frontend.client.client import CoreClient
from headrace.ipc.codec import Codec, CodecError, Tensor
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import AddRequest, ClientMessage, CoreMessage, Dismissed, GetStats, Load, StepOutputs
from headrace.ipc.transport.sockets import CutShortError, bind_router, new_dealer, send_whole

LARGE = StepOutputs(
    step=1, slots=Tensor.of("int32", [7] * 50_000), token_ids=Tensor("int32", (50_000,), memoryview(bytes(200_000)))
)
SMALL = Load(num_running=1, num_waiting=2)


def unsendable(size_bytes: int = 1000) -> memoryview:
    """ZeroMQ can take no bytes from it."""
    return memoryview(bytes(2 * size_bytes))[::2]


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any, bytes]]:
    """A core's socket, a client's, and what the first calls the second."""
    with zmq.Context() as context:
        router, address = bind_router(context, "")
        dealer = new_dealer(context, address)
        dealer.connect(address)
        dealer.send(b"")
        identity, _ = router.recv_multipart()
        yield router, dealer, identity
        dealer.close(0)
        router.close(0)


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_message_that_fails_between_its_frames_is_none_and_leaves_the_next_whole(
    pair: tuple[Any, Any, bytes], nth: int
) -> None:
    router, dealer, identity = pair
    codec: Codec[CoreMessage] = Codec(CoreMessage)
    frames: list[Any] = codec.encode(LARGE)
    assert len(frames) == 3
    frames[nth] = unsendable()
    with pytest.raises(CutShortError, match="contiguous"):
        send_whole(router, identity, frames)
    send_whole(router, identity, codec.encode(SMALL))
    send_whole(router, identity, codec.encode(LARGE))
    with pytest.raises(CodecError, match="cut short"):
        codec.decode(dealer.recv_multipart())
    assert codec.decode(dealer.recv_multipart()) == SMALL
    assert codec.decode(dealer.recv_multipart()) == LARGE


def test_nothing_is_sent_of_a_message_to_nobody(pair: tuple[Any, Any, bytes]) -> None:
    router, dealer, identity = pair
    codec: Codec[CoreMessage] = Codec(CoreMessage)
    with pytest.raises(zmq.ZMQError) as refused:
        send_whole(router, b"nobody", codec.encode(LARGE))
    assert refused.value.errno == zmq.EHOSTUNREACH
    send_whole(router, identity, codec.encode(SMALL))
    assert codec.decode(dealer.recv_multipart()) == SMALL


@pytest.fixture
def port() -> Iterator[tuple[ZmqPort, Inbox]]:
    inbox, port = Inbox(), ZmqPort("")
    port.serve(Sessions(inbox, welcome_of(*make_plan()), None))
    yield port, inbox
    port.close()


@pytest.mark.parametrize("size_bytes", [1000, 2 * COUNTED_BYTES])
def test_the_client_that_a_message_fails_for_ends_with_the_cause_and_no_other(
    port: tuple[ZmqPort, Inbox], size_bytes: int
) -> None:
    """Cut messages used to be joined with those of other clients."""
    core, inbox = port

    async def main() -> None:
        client = await CoreClient.connect(core.address)
        stats = asyncio.ensure_future(client.get_stats())
        _, asked = await asyncio.to_thread(inbox.get, 20)
        assert isinstance(asked, GetStats)
        with WireClient(core.address) as other:
            wait_until(lambda: core.clients == [1, 2], 30, "the port knows both, which it has answered")
            core._send(1, [b"the first frame", unsendable(size_bytes)])
            core.send(2, SMALL)
            other.receive(Load, lambda load: load == SMALL)
            assert core.clients == [2]
            with pytest.raises(EngineDeadError, match="it was cut short: its sender failed within it"):
                await asyncio.wait_for(stats, 20)
        await client.close()

    asyncio.run(main())
    assert inbox.get(timeout=60) == (1, ClientGone())


def test_a_client_whose_request_could_not_be_taken_does_not_wait_for_it() -> None:
    class Full(Sessions):
        def receive(self, client: int, message: ClientMessage) -> CoreMessage | None:
            if isinstance(message, AddRequest):
                raise MemoryError
            return super().receive(client, message)

    inbox, port = Inbox(), ZmqPort("")
    port.serve(Full(inbox, welcome_of(*make_plan()), None))
    try:
        with WireClient(port.address) as client, WireClient(port.address) as other:
            wait_until(lambda: port.clients == [1, 2], 30, "the port knows both, which it has answered")
            client.add(1, [5, 6])
            assert "could not be received: MemoryError" in client.receive(Dismissed).failure.message
            assert inbox.get(timeout=60) == (1, ClientGone())
            assert port.clients == [2]
            port.send(2, SMALL)
            other.receive(Load)
    finally:
        port.close()


SUBMIT = """
import array, asyncio, resource, sys
import psutil
from headrace import SamplingParams
from headrace.frontend.client.client import CoreClient
from headrace.frontend.request.checks import check
from headrace.frontend.request.prompts import Prompt

BLOCK_BYTES, MOST_SPARE = 128 << 10, 24
ONE, PROMPT = SamplingParams(max_tokens=1), list(range(5, 25)) * 10_000
hog = []

def fill():
    try:
        while True:
            hog.append(bytearray(BLOCK_BYTES))
    except MemoryError:
        pass

async def main():
    client = await CoreClient.connect(sys.argv[1])
    most = psutil.Process().memory_info().vms + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for spare in range(MOST_SPARE):
        fill()
        del hog[len(hog) - spare:]
        large = None
        try:
            large = client.submit(check(f"large {spare}", Prompt(token_ids=PROMPT), ONE, client))
            outcome = "sent"
        except MemoryError:
            outcome = "refused"
        hog.clear()
        small = client.submit(check(f"small {spare}", Prompt(token_ids=[5]), ONE, client))
        for stream in filter(None, (large, small)):
            answer = await asyncio.wait_for(stream.final(), 10)
            assert len(answer.outputs[0].token_ids) == 1, answer
        assert len(client.requests) == 0, len(client.requests)
        print(outcome, flush=True)
    await client.close()

asyncio.run(main())
"""


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of a process are Unix's")
def test_a_client_with_its_address_space_used_up_refuses_a_request_and_serves_the_next(tmp_path: Path) -> None:
    """With room for ever more blocks, so that each of the steps of a submission fails once."""
    with zmq_core(max_model_len=1_000_000) as core:
        done = subprocess.run(
            [sys.executable, "-c", SUBMIT, core.address],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "MALLOC_ARENA_MAX": "1", "HEADRACE_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert {*done.stdout.split()} == {"refused", "sent"}
        prompts = [each for each in core.core.received if isinstance(each, AddRequest)]
        assert {len(each.prompt_token_ids) for each in prompts} == {1, 200_000}
