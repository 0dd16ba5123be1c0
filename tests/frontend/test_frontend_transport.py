"""Over real sockets: refused, lost, foreign, late and large."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_core import FakeCore, Faults, ZmqCore, zmq_core
from patience import within
from source_tree import PYTHONPATH

from headrace import EngineDeadError, ModelError, QueueFullError, SamplingParams, __version__
from headrace.frontend.client import transport
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import MemoryTransport, ZmqTransport
from headrace.frontend.request.checks import check
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import Failure
from headrace.ipc.messages import SCHEMA_HASH, ClientMessage, CoreMessage, Hello
from headrace.ipc.process.runtime_directory import AddressError
from headrace.ipc.transport import sockets

pytestmark = pytest.mark.usefixtures("private_cache")

LONG = SamplingParams(max_tokens=200)
ENDLESS = SamplingParams(max_tokens=None)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_a_refused_connection_fails_at_once(tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    for address in (f"ipc://{tmp_path}/none.sock", f"ipc://{stale}", "tcp://127.0.0.1:1"):
        start_s = time.monotonic()
        with pytest.raises(EngineDeadError, match=re.escape(f"no engine-core listens at {address}")):
            run(CoreClient.connect(address))
        assert time.monotonic() - start_s < within(2.0)


@pytest.mark.parametrize(
    "address", ["tcp://10.1.2.3:5", "tcp://0.0.0.0:5", "http://127.0.0.1", "", "ipc://", None, 5, b"ipc:///x"]
)
def test_an_address_that_cannot_be_used_is_refused_in_a_sentence(address: Any) -> None:
    with pytest.raises(AddressError, match=r"loopback|is no address"):
        run(CoreClient.connect(address))


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(AddressError, match="cannot connect to ipc:"):
        run(CoreClient.connect("ipc:///" + "x" * 200))


def test_a_core_of_another_version_is_refused_with_both_values() -> None:
    with zmq_core(faults=Faults(schema_hash="0123456789abcdef")) as core, pytest.raises(EngineDeadError) as caught:
        run(CoreClient.connect(core.address))
    said = str(caught.value)
    assert all(part in said for part in ("headrace 9.9.9", "0123456789abcdef", f"headrace {__version__}", SCHEMA_HASH))


def test_a_core_that_does_not_answer_is_given_up() -> None:
    with (
        zmq_core(faults=Faults(ignore_hello=True)) as core,
        pytest.raises(EngineDeadError, match=r"did not welcome this client within 0.2 s"),
    ):
        run(CoreClient.connect(core.address, timeout_s=0.2))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
def test_another_users_engine_is_no_missing_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        os.seteuid(65534)
        try:
            with pytest.raises(EngineDeadError, match="is another user's: permission denied"):
                run(CoreClient.connect(f"ipc://{path}"))
        finally:
            os.seteuid(0)


def test_something_else_that_listens_there_is_no_core(tmp_path: Path) -> None:
    context = zmq.Context()
    with context.socket(zmq.PUB) as foreign:
        foreign.bind(f"ipc://{tmp_path}/pub.sock")
        with pytest.raises(EngineDeadError, match=r"is no engine-core of this version|no engine-core listens"):
            run(CoreClient.connect(f"ipc://{tmp_path}/pub.sock", timeout_s=60))
    context.term()


def test_another_tokenizer_than_announced_is_refused() -> None:
    with zmq_core(faults=Faults(wrong_tokenizer=True)) as core, pytest.raises(ModelError, match="had announced"):
        run(CoreClient.connect(core.address))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (Faults(die_after_steps=3), "is gone: the connection was lost"),
        (Faults(fail_after_steps=3), "ran out of memory"),
        (Faults(garbage_after_steps=3), "sent something else than a message"),
    ],
)
def test_a_core_that_goes_wrong_ends_every_wait_at_once(faults: Faults, said: str) -> None:
    async def test() -> None:
        client = await CoreClient.connect(core.address)
        streams = [client.submit(check(str(each), Prompt(token_ids=[5]), LONG, client)) for each in range(3)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match=said):
                await stream.final()
        with pytest.raises(EngineDeadError, match=said):
            await client.get_stats()
        with pytest.raises(EngineDeadError, match=said):
            client.submit(check("late", Prompt(token_ids=[5]), LONG, client))
        await client.close()

    with zmq_core(faults=faults) as core:
        run(test())


SERVE = """
import sys
sys.path[:0] = {tests!r}.split(':')
from fake_core import FakeCore, ZmqCore
core = ZmqCore(FakeCore(max_model_len=1_000_000), {address!r})
print("ready", flush=True)
core.thread.join()
"""


def test_a_killed_core_is_noticed_at_once_and_its_cause_told(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    script = SERVE.format(tests=PYTHONPATH, address=address)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    async def test(cause_grace_s: float, kill: Callable[[CoreClient], None]) -> str:
        client = CoreClient(ZmqTransport(address), cause_grace_s=cause_grace_s)
        await client.start()
        calls = [
            asyncio.ensure_future(client.submit(check(str(i), Prompt(token_ids=[5]), ENDLESS, client)).final())
            for i in range(2)
        ]
        kill(client)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, EngineDeadError) for error in errors)
        await client.close()
        return str(errors[0])

    def kill(client: CoreClient) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        client.fail_threadsafe(Failure(message="killed by signal 9"))

    said = run(test(60.0, kill))  # for longer than `run` lets it wait
    process.stdout.close()
    assert said == "killed by signal 9"


def test_a_core_that_stops_answering_without_closing_is_found_by_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PEER_TIMEOUT", "3")
    address = f"ipc://{tmp_path}/core.sock"
    script = SERVE.format(tests=PYTHONPATH, address=address)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    async def test() -> float:
        client = await CoreClient.connect(address)
        os.kill(process.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(EngineDeadError, match="the connection was lost"):
            await client.submit(check("r", Prompt(token_ids=[5]), ENDLESS, client)).final()
        elapsed_s = time.monotonic() - start_s
        await client.close()
        return elapsed_s

    try:
        assert run(test()) < within(8.0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_waits_for_a_core_that_reads_nothing_is_bounded_and_the_request_beyond_is_told_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MOST_UNSENT_BYTES", 2_000_000)
    monkeypatch.setattr(sockets, "CLIENT_SENDS_MESSAGES", 4)
    address = f"ipc://{tmp_path}/core.sock"
    script = SERVE.format(tests=PYTHONPATH, address=address)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    async def test() -> None:
        client = await CoreClient.connect(address)
        os.kill(process.pid, signal.SIGSTOP)
        prompt, count = Prompt(token_ids=[5] * 100_000), 0
        while not client._transport.is_full:
            client.submit(check(str(count), prompt, LONG, client))
            client.abort(str(count))  # as an HTTP client's that leaves; the message waits all the same
            await asyncio.sleep(0)
            count += 1
            assert count < 1000, "nothing bounds what waits"
        with pytest.raises(QueueFullError, match="the engine-core reads nothing") as caught:
            client.submit(check("one more", prompt, LONG, client))
        assert caught.value.failure is not None
        assert caught.value.failure.retry_after_s > 0
        os.kill(process.pid, signal.SIGCONT)
        while client._transport.is_full:
            await asyncio.sleep(0.01)
        assert (
            len((await client.submit(check("late", Prompt(token_ids=[5]), LONG, client)).final()).outputs[0].token_ids)
            == 200
        )
        assert client._transport._unsent_bytes == 0
        await client.close()

    try:
        run(test())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_core_that_comes_back_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"

    async def test() -> None:
        client = await CoreClient.connect(address)
        first.stop()
        second = ZmqCore(FakeCore(), address)
        with pytest.raises(EngineDeadError, match="the connection was lost"):
            await client.get_stats()
        assert second.core.received == []
        again = await CoreClient.connect(address)
        assert (await again.get_stats()).num_running == 0
        await again.close()
        await client.close()
        second.stop()

    first = ZmqCore(FakeCore(), address)
    run(test())


def test_many_requests_and_long_prompts_all_arrive() -> None:
    async def test() -> None:
        client = await CoreClient.connect(core.address)
        prompts = [[index % 200] * 2000 for index in range(500)]
        params = SamplingParams(max_tokens=2)
        streams = [
            client.submit(check(str(i), Prompt(token_ids=prompt), params, client)) for i, prompt in enumerate(prompts)
        ]
        outputs = [await stream.final() for stream in streams]
        assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
        assert len(client.requests) == 0
        await client.close()

    with zmq_core(max_model_len=4096) as core:
        run(test())


def test_clients_come_and_go_without_leaving_descriptors() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def test() -> None:
        for _ in range(3):
            await (await CoreClient.connect(core.address)).close()
        before = descriptors()
        for _ in range(10):
            client = await CoreClient.connect(core.address)
            await client.submit(check("r", Prompt(token_ids=[5]), SamplingParams(max_tokens=2), client)).final()
            await client.close()
        assert descriptors() <= before + 2

    with zmq_core() as core:
        run(test())


def test_a_client_that_is_cancelled_in_the_turn_of_its_welcome_does_not_go_on() -> None:
    """Else nobody ends what waits for it: a server that was interrupted while it attached to its engine never ended."""

    async def test() -> None:
        core = FakeCore()

        class Port:
            def open(self, hello: Hello, deliver: Callable[[CoreMessage], None]) -> int:
                for _, reply in core.take("client", hello):
                    deliver(reply)
                    asyncio.get_running_loop().call_soon(starting.cancel)  # once the reply has been read
                return 1

            def receive(self, client: int, message: ClientMessage) -> None:
                core.take("client", message)

        transport = MemoryTransport(Port())
        starting = asyncio.create_task(CoreClient(transport).start(with_tokenizer=False))
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(test())
