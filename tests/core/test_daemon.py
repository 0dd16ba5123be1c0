"""Ring 1: engine-core as a real process, with an executor that computes nothing. Deaths, garbage, drains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until
from source_tree import PYTHONPATH
from thinned import every
from wire_client import WireClient, request_message

from headrace.core.options.engine_options import Options
from headrace.core.process.child import Child, start_engine
from headrace.ipc.control import PauseGeneration, ReloadWeights
from headrace.ipc.failure import EngineStartError, Failure
from headrace.ipc.messages import (
    Abort,
    Control,
    Draining,
    EngineFailed,
    FinishReason,
    Hello,
    Refused,
    Reply,
    StepOutputs,
    Welcome,
)
from headrace.ipc.transport.keys import make_key_file
from headrace.ipc.transport.sockets import (
    ipc_path,
    new_ipc_address,
    remove_leftover,
    remove_leftovers_of,
    sweep_sockets,
)

NULL = "headrace.executor.testing.null:NullExecutor"
FOREVER = 30_000


def null_options(**model: Any) -> Options:
    return Options(distributed_executor_backend=NULL, model="null", hf_overrides=model, max_num_seqs=64)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def engine(address: str = "", **model: Any) -> Iterator[tuple[Child, str]]:
    child = start_engine(null_options(**model), address)
    try:
        yield child, child.wait_ready(30).address
    finally:
        child.stop(0.0)
        assert not child.alive


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[str]:
    """One engine for the tests that leave it as they found it."""
    with engine(step_delay_s=0.002) as (_, address):
        yield address


def test_several_clients_share_one_core(shared_engine):
    with WireClient(shared_engine) as first, WireClient(shared_engine) as second:
        first.add(1, [5, 6, 7], max_tokens=5)
        second.add(1, [8, 9], max_tokens=7)
        assert first.finish(1).reason == FinishReason.LENGTH
        assert second.finish(1).reason == FinishReason.LENGTH
        tokens = [sum(len(m.slots) for m in c.heard if isinstance(m, StepOutputs)) for c in (first, second)]
        assert tokens == [5, 7]


def test_a_killed_client_is_freed_and_others_go_on(shared_engine):
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1].split(':')\n"
        "from wire_client import WireClient\n"
        "from headrace.ipc.messages import StepOutputs\n"
        "client = WireClient(sys.argv[2])\n"
        "[client.add(slot, [5, 6], max_tokens=30000, ignore_eos=True) for slot in range(3)]\n"
        "client.receive(StepOutputs); print('streaming', flush=True); time.sleep(60)\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script, PYTHONPATH, shared_engine], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    assert victim.stdout.readline().strip() == "streaming"
    with WireClient(shared_engine) as other:
        other.add(1, [5, 6], max_tokens=FOREVER, ignore_eos=True)
        wait_until(lambda: other.stats().num_running == 4, 30, "all requests running")
        victim.kill()
        victim.wait()
        victim.stdout.close()
        wait_until(lambda: other.stats().num_running == 1, 30, "freeing the dead client's requests")
        other.receive(StepOutputs)
        other.send(Abort(slots=(1,)))
        assert other.finish(1).reason == FinishReason.ABORT


def test_a_waiting_request_of_a_killed_client_is_freed_too():
    with engine(step_delay_s=0.05) as (_, address):
        busy = WireClient(address)
        for slot in range(64):
            busy.add(slot, [5, 6], max_tokens=FOREVER, ignore_eos=True)
        gone = WireClient(address)
        gone.add(1, [5, 6], max_tokens=FOREVER, ignore_eos=True)
        wait_until(lambda: busy.stats().num_waiting == 1, 30, "the last request to wait")
        gone.close()
        wait_until(lambda: busy.stats().num_waiting == 0, 30, "freeing the waiting request")
        busy.close()


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b""], "it was cut short"),
        ([b"\x00"], "not a message of this version"),
        ([b"garbage" * 100], "not a message of this version"),
        ([os.urandom(5000), os.urandom(10)], "not a message of this version"),
        ([b"\x91\xa8NoSuchMessage"], "not a message of this version"),
    ],
)
def test_garbage_is_refused_and_the_session_goes_on(shared_engine, frames, said):
    with WireClient(shared_engine) as client:
        client.socket.send_multipart(frames)
        assert said in client.receive(Refused).failure.message
        client.add(1, [5], max_tokens=2)
        assert client.finish(1).reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": True},
        {"priority": 2.5},
        {"request_id": 5},
        {"request_id": None},
        {"cache_salt": b"x"},
        {"task": "generate"},
        {"num_resumed_tokens": "none"},
        {"prompt_token_ids": [5]},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_decoded_gets_its_finish(shared_engine, wrong):
    with WireClient(shared_engine) as client:
        client.send(request_message(1, **wrong))
        finish = client.finish(1)
        assert finish.reason == FinishReason.REJECTED
        assert "not a message of this version" in finish.failure.message
        client.add(1, [5], max_tokens=2)
        assert client.finish(1).reason == FinishReason.LENGTH


def test_a_request_that_cannot_be_decoded_leaves_the_one_in_its_slot_alone(shared_engine):
    with WireClient(shared_engine) as client:
        client.add(1, [5], max_tokens=200, ignore_eos=True)
        client.send(request_message(1, priority="high"))
        assert "not a message of this version" in client.receive(Refused).failure.message
        assert client.finish(1).reason == FinishReason.LENGTH
        assert sum(len(m.slots) for m in client.heard if isinstance(m, StepOutputs)) == 200


@pytest.mark.parametrize(
    "message",
    [
        Control(call=3, command=ReloadWeights(path=5)),
        Control(call=3, command=PauseGeneration(mode="gently")),
        Control(call=3, command=5),
    ],
    ids=str,
)
def test_a_call_that_cannot_be_decoded_gets_its_reply(shared_engine, message):
    with WireClient(shared_engine) as client:
        client.send(message)
        assert "not a message of this version" in client.receive(Reply, lambda reply: reply.call == 3).failure.message
        assert client.stats().num_running == 0


def test_bytes_that_are_not_even_zeromq_disturb_nobody(shared_engine):
    path = ipc_path(shared_engine)
    with socket.socket(socket.AF_UNIX) as stranger, WireClient(shared_engine) as client:
        stranger.connect(str(path))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + os.urandom(1000))
        client.add(1, [5], max_tokens=2)
        assert client.finish(1).reason == FinishReason.LENGTH


def test_another_version_is_refused_with_both_values(shared_engine):
    with WireClient(shared_engine, greet=False) as client:
        client.send(Hello(schema_hash="0123456789abcdef", version="9.9", pid=1))
        refusal = client.receive(Refused)
        assert "9.9 (messages 0123456789abcdef)" in refusal.failure.message
        assert refusal.schema_hash in refusal.failure.message


def test_a_request_before_hello_is_refused(shared_engine):
    with WireClient(shared_engine, greet=False) as client:
        client.add(1, [5])
        assert "AddRequest before Hello" in client.receive(Refused).failure.message


def test_a_slot_in_use_is_refused_and_keeps_its_request(shared_engine):
    with WireClient(shared_engine) as client:
        client.add(1, [5], max_tokens=200, ignore_eos=True)
        client.add(1, [6], max_tokens=3)
        assert "slot 1 is in use" in client.receive(Refused).failure.message
        assert client.finish(1).reason == FinishReason.LENGTH
        assert sum(len(m.slots) for m in client.heard if isinstance(m, StepOutputs)) == 200


@pytest.mark.system
def test_an_idle_core_uses_no_processor_time():
    with engine() as (child, address), WireClient(address) as client:
        client.add(1, [5], max_tokens=4)
        client.finish(1)
        process = psutil.Process(child.pid)
        # Long enough for the audit, a second after the last step. Several times, as a tick of a busy machine's clock
        # can be as much as is allowed.
        wait_until(lambda: _cpu_share(process, 3.0) < 0.01, 20, "coming to rest")


def report_to(reported: list[Failure], told: threading.Event) -> Callable[[Failure], None]:
    def report(failure: Failure) -> None:
        reported.append(failure)
        told.set()

    return report


def _cpu_share(process: psutil.Process, seconds: float) -> float:
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def test_a_killed_core_is_reported_with_its_signal_and_clients_hear_of_it():
    reported: list[Failure] = []
    told = threading.Event()
    with engine(step_delay_s=0.01) as (child, address), WireClient(address) as client:
        child.on_exit(report_to(reported, told))
        client.add(1, [5], max_tokens=FOREVER, ignore_eos=True)
        client.receive(StepOutputs)
        os.kill(child.pid, signal.SIGKILL)
        assert told.wait(60)
        assert "killed by signal 9 (SIGKILL)" in reported[0].message
        assert f"pid {child.pid}" in reported[0].message
        assert reported[0].phase == "serve"


def test_a_step_that_raises_ends_the_core_with_its_traceback():
    reported: list[Failure] = []
    told = threading.Event()
    with engine(crash_token_id=13) as (child, address), WireClient(address) as first, WireClient(address) as second:
        child.on_exit(report_to(reported, told))
        first.add(1, [5, 13])
        for client in (first, second):
            failure = client.receive(EngineFailed).failure
            assert failure.type == "RuntimeError"
            assert "told to crash" in failure.message
            assert "in step" in failure.traceback
        assert told.wait(60)
        assert (reported[0].type, reported[0].message) == ("RuntimeError", failure.message)  # not: it ended with 70
        assert child.status == 70


def test_a_row_that_fails_fails_one_request_only():
    with engine(fail_token_id=13) as (_, address), WireClient(address) as client:
        client.add(1, [5, 13])
        client.add(2, [5, 6])
        assert client.finish(1).reason == FinishReason.FAILED
        assert client.finish(2).reason == FinishReason.LENGTH


def test_a_core_dies_with_the_process_that_started_it():
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1].split(':')\n"
        "from test_daemon import null_options\n"
        "from headrace.core.process.child import start_engine\n"
        "child = start_engine(null_options()); print(child.wait_ready(30).address, child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, PYTHONPATH], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])
    assert not is_gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: is_gone(pid), 30, "the orphan's end")


def test_a_start_that_fails_gives_the_cause():
    child = start_engine(Options(distributed_executor_backend="headrace.nowhere:Nothing"))
    with pytest.raises(EngineStartError, match=r"headrace\.nowhere:Nothing.* cannot be loaded: No module named"):
        child.wait_ready(30)
    child.stop()


def test_a_core_killed_while_it_loads_gives_the_signal_and_the_phase():
    child = start_engine(null_options(load_delay_s=60.0))
    phases: list[str] = []

    def on_progress(progress: Any) -> None:
        phases.append(progress.phase)
        if progress.phase == "load weights":
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(EngineStartError, match="killed by signal 9") as caught:
        child.wait_ready(30, on_progress)
    assert caught.value.failure is not None
    assert caught.value.failure.phase == "load weights"
    assert phases[0] == "import"


def test_a_core_that_is_not_ready_in_time_is_ended():
    child = start_engine(null_options(load_delay_s=60.0))
    with pytest.raises(EngineStartError, match="not ready within 2 s"):
        child.wait_ready(2.0)
    assert not child.alive


def run_daemon(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace.core.process.daemon", "--model", "null"),
            *("--distributed-executor-backend", NULL, *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready_address(daemon: subprocess.Popen[str]) -> str:
    assert daemon.stdout is not None
    line = daemon.stdout.readline()
    assert line.startswith("engine-core: ready at "), line
    return line.split()[-1]


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.system) for each in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_daemon_drains_on_the_first_signal_and_leaves_no_file(number):
    daemon = run_daemon("--hf-overrides", '{"step_delay_s": 0.01}')
    address = ready_address(daemon)
    with WireClient(address) as client:
        client.add(1, [5], max_tokens=100, ignore_eos=True)
        client.receive(StepOutputs)
        daemon.send_signal(number)
        client.receive(Draining)
        client.add(2, [5], max_tokens=5)
        rejected = client.finish(2)
        assert rejected.reason == FinishReason.REJECTED
        assert "shutting down" in rejected.failure.message
        assert client.finish(1).reason == FinishReason.LENGTH
    _, stderr = daemon.communicate(timeout=60)
    assert daemon.returncode == 0
    assert "1 requests have up to 30 s to finish; a second signal ends them now" in stderr
    assert not ipc_path(address).exists()


def test_a_daemon_with_keys_serves_who_has_them_over_tcp(tmp_path, monkeypatch):
    make_key_file(tmp_path / "deployment.keys")
    daemon = run_daemon("--address", "tcp://127.0.0.1:*", "--keys", str(tmp_path / "deployment.keys"))
    address = ready_address(daemon)
    monkeypatch.setenv("HEADRACE_KEYS", str(tmp_path / "deployment.keys"))
    with WireClient(address) as client:
        client.add(1, [5], max_tokens=3, ignore_eos=True)
        assert client.finish(1).reason == FinishReason.LENGTH
    daemon.send_signal(signal.SIGTERM)
    daemon.communicate(timeout=60)
    assert daemon.returncode == 0


def test_a_second_sigterm_does_not_wait():
    daemon = run_daemon("--hf-overrides", '{"step_delay_s": 0.01}')
    with WireClient(ready_address(daemon)) as client:
        client.add(1, [5], max_tokens=FOREVER, ignore_eos=True)
        client.receive(StepOutputs)
        daemon.send_signal(signal.SIGTERM)
        client.receive(Draining)
        daemon.send_signal(signal.SIGTERM)
        finish = client.finish(1)
        assert finish.reason == FinishReason.FAILED
        assert "shut down before this request was finished" in finish.failure.message
    daemon.communicate(timeout=60)
    assert daemon.returncode == 0


def test_a_daemon_serves_tcp_on_loopback_and_publishes_the_port_it_bound():
    daemon = run_daemon("--address", "tcp://127.0.0.1:*")
    address = ready_address(daemon)
    assert address.startswith("tcp://127.0.0.1:")
    with WireClient(address) as client:
        assert isinstance(client.welcome, Welcome)
        client.add(0, [5], max_tokens=1)
        assert client.finish(0).reason == FinishReason.LENGTH
    daemon.terminate()
    daemon.communicate(timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    every(
        2,
        [
            (["--address", "tcp://0.0.0.0:5555"], 1, "no loopback address"),
            (["--address", "nonsense"], 1, "use ipc:///path/to/socket or tcp://HOST:PORT"),
            (["--max-num-sequences", "3"], 2, "max-num-seqs"),
            (["--hf-overrides", '{"no_such_field": 1}'], 1, "no_such_field"),
        ],
    ),
)
def test_a_daemon_that_cannot_start_says_why_in_a_sentence(arguments, status, words):
    daemon = run_daemon(*arguments)
    _, stderr = daemon.communicate(timeout=60)
    assert daemon.returncode == status
    assert words in stderr
    assert "Traceback" not in stderr


def test_an_address_in_use_is_refused(shared_engine):
    daemon = run_daemon("--address", shared_engine)
    _, stderr = daemon.communicate(timeout=60)
    assert daemon.returncode == 1
    assert "another process does" in stderr
    with WireClient(shared_engine) as client:
        client.add(1, [5], max_tokens=2)
        assert client.finish(1).reason == FinishReason.LENGTH


def test_no_socket_stays_when_the_parent_of_an_engine_is_killed(runtime_directory, tmp_path):
    script = (
        "import sys; from headrace import LLM; llm = LLM('null', **eval(sys.argv[1])); print('up', flush=True);"
        "sys.stdin.read()"
    )
    options = {
        "distributed_executor_backend": "headrace.executor.testing.null:NullExecutor",
        "skip_tokenizer_init": True,
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", script, repr(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert len(list(runtime_directory.glob("*.sock"))) == 1
    finally:
        parent.kill()
        parent.communicate()
    wait_until(lambda: not list(runtime_directory.glob("*.sock")), 30, "the socket's end")


def test_a_leftover_socket_is_swept_though_another_process_has_its_number(runtime_directory):
    def leave_socket(name: str, age_s: float) -> Path:
        path = runtime_directory / name
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        os.utime(path, (time.time() - age_s, time.time() - age_s))
        return path

    kernel = ipc_path(new_ipc_address("engine")).stem.rpartition("-")[2][:6]
    old = leave_socket(f"engine-{os.getpid()}-{kernel}0123abcd.sock", 3600)
    young = leave_socket(f"engine-{os.getpid()}-{kernel}4567abcd.sock", 0)
    alive = runtime_directory / f"engine-{os.getpid()}-{kernel}89ababcd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(alive))
        listener.listen()
        os.utime(alive, (0, 0))
        sweep_sockets()
        assert (old.exists(), young.exists(), alive.exists()) == (False, True, True)


def test_sockets_of_other_containers_and_hosts_are_not_swept(runtime_directory):
    """Of a container that shares the folder no process is seen here, and of another host no socket answers."""
    made = ipc_path(new_ipc_address("engine"))
    no_pid = made.name.replace(f"-{os.getpid()}-", "-4194305-")
    in_container = runtime_directory / no_pid
    of_another_host = runtime_directory / no_pid.replace(
        "4194305-" + made.stem.rpartition("-")[2][:6], "4194305-000000"
    )
    of_a_user = runtime_directory / "mine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(in_container))
        listener.listen()
        for path in (of_another_host, of_a_user):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
        for path in (in_container, of_another_host, of_a_user):
            os.utime(path, (0, 0))
        new_ipc_address("engine")
        assert sorted(runtime_directory.iterdir()) == sorted([in_container, of_another_host, of_a_user])


def test_what_a_child_has_left_is_no_socket_of_another_containers_process_with_its_number(runtime_directory):
    """Two containers on one folder may have a process of one number each: theirs answers."""
    made = ipc_path(new_ipc_address("engine")).name.replace(f"-{os.getpid()}-", "-4194305-")
    alive = runtime_directory / made
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(alive))
        listener.listen()
        remove_leftovers_of(4194305)
        remove_leftover(f"ipc://{alive}")
        assert alive.exists()
    remove_leftovers_of(4194305)
    assert not alive.exists()


def test_a_killed_engines_socket_goes_with_it_and_others_leftovers_with_the_next_start(runtime_directory):
    made = ipc_path(new_ipc_address("engine")).name.replace(f"-{os.getpid()}-", "-4194305-")
    leftover = runtime_directory / made  # its process id is beyond the highest of Linux
    leftover.touch()
    os.utime(leftover, (0, 0))
    with engine() as (child, address):
        assert not leftover.exists()
        assert ipc_path(address).exists()
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: not child.alive, 30, "the core's end")
        assert not ipc_path(address).exists()
