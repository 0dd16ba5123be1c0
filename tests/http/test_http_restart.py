"""An engine that dies: its clients hear why, and where that was asked for it is started again.

What it had not begun to answer is then answered by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from http_server import HERE, Server, engine_of, events_of, metric, serving
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from patience import wait_until, within
from test_http_lifecycle import COMPLETIONS, ENDLESS, SLOW, streaming

from headrace.core.options.parsing import parse_options
from headrace.core.process.child import Child, start_engine

NULL_ENGINE: dict[str, Any] = {
    **{"model": "null", "distributed_executor_backend": BACKEND},
    **{"hf_overrides": {"vocab_size": VOCAB_SIZE, **SLOW}},
}


@pytest.mark.parametrize(
    ("how", "processes"),
    [
        ("raises", "2"),
        pytest.param("is killed", "1", marks=pytest.mark.system),
        pytest.param("is killed", "2", marks=pytest.mark.system),
    ],
)
def test_an_engine_that_dies_ends_its_streams_with_the_cause_and_the_server(how, processes):
    cause = {"raises": "told to crash", "is killed": "was killed by signal 9"}[how]
    options = ("--api-server-count", processes)
    with serving(*options, null_model={**SLOW, "crash_token_id": 99}) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(stack.enter_context(server.client()))) for _ in range(6)]
        pool = stack.enter_context(ThreadPoolExecutor(1))
        if how == "raises":
            asked: dict[str, Any] = {"prompt": [5, 99]}
        else:
            asked = ENDLESS
        whole = pool.submit(stack.enter_context(server.client()).post, COMPLETIONS, json=asked)
        if how == "is killed":
            with server.client() as watcher:
                wait_until(lambda: metric(watcher, "headrace:num_requests_running") == 7, 30, "all to run")
            engine_of(server).kill()
        for lines in streams:
            *_, last, done = [line for line in lines if line]
            assert cause in last
            assert '"code":"engine_dead"' in last
            assert done == "data: [DONE]"
        answer = whole.result(60)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert cause in answer.json()["error"]["message"]
        assert server.wait_exit() == 70
        assert "the engine has ended: " in server.log


@contextlib.contextmanager
def engine_at(address: str) -> Iterator[Child]:
    """An engine that is nobody's child but this test's."""
    child = start_engine(parse_options(**NULL_ENGINE), address)
    try:
        child.wait_ready(60)
        yield child
    finally:
        child.kill()


@pytest.mark.system
def test_servers_attach_again_to_an_engine_that_is_started_anew_at_its_address(tmp_path, monkeypatch):
    """Meanwhile streams end with what this host shows of the process, and health, models and log tell the state."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    address = f"ipc://{tmp_path}/engine.sock"
    options = ("--engine", address, "--api-server-count", "2")
    with contextlib.ExitStack() as stack:
        with engine_at(address) as engine:
            server = stack.enter_context(serving(*options, attached=True))
            client = stack.enter_context(server.client())
            with streaming(client) as lines:
                os.kill(engine.pid, signal.SIGKILL)
                last_event = [line for line in lines if line][-2]
            assert '"code":"engine_dead"' in last_event
            assert f"its process {engine.pid} ended without a word, as one does that is killed" in last_event
        server.wait_log("the engine has ended: ")
        for path, status in (("/health/ready", 503), ("/health", 503), ("/v1/models", 503), ("/health/live", 200)):
            wait_until_all(server, path, status)
        answer = client.post(COMPLETIONS, json={"prompt": [5]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        stack.enter_context(engine_at(address))
        for path in ("/health/ready", "/v1/models"):
            wait_until_all(server, path, 200)
        assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200
        server.wait_log(f"the engine at {address} is connected again")
        server.signal()
        assert server.wait_exit() == 0
        assert server.log.count("the engine has ended: ") == 1, "one of several processes tells, once"


def wait_until_all(server: Server, path: str, status: int) -> None:
    """Every process of the server answers so; which one is asked, the kernel chooses for each connection."""

    def answers() -> bool:
        with server.client() as client:
            return client.get(path).status_code == status

    wait_until(lambda: all(answers() for _ in range(8)), 40, f"{path} with {status}")


@pytest.mark.system
def test_an_attached_engine_that_was_stopped_for_longer_than_the_peer_timeout_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    address = f"ipc://{tmp_path}/engine.sock"
    with (
        engine_at(address) as engine,
        serving("--engine", address, "--peer-timeout", "2", attached=True) as server,
        server.client() as client,
    ):
        asked = {"prompt": [7, 8], "max_tokens": 20, "ignore_eos": True, "temperature": 1, "seed": 3}
        expected = client.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
        with streaming(client) as lines:
            os.kill(engine.pid, signal.SIGSTOP)
            last_event = [line for line in lines if line][-2]
        assert '"code":"engine_dead"' in last_event
        server.wait_log("the engine has ended: .* is stopped, by a signal or a debugger")
        assert client.get("/health/ready").status_code == 503
        os.kill(engine.pid, signal.SIGCONT)
        server.wait_log(f"the engine at {address} is connected again")
        assert client.post(COMPLETIONS, json=asked).json()["choices"][0]["text"] == expected
        assert metric(client, "headrace:num_requests_running") == 0, "what it had at its stop has ended"


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.system), "2"])
def test_an_engine_is_started_again_when_that_was_asked_for(processes):
    with (
        serving("--restart-engine", "2", "--api-server-count", processes, null_model=SLOW) as server,
        server.client() as client,
    ):
        with streaming(client) as lines:
            engine_of(server).kill()
            more = [next(lines) for _ in range(100)]
            assert all('"finish_reason":null' in line for line in more if line), "it goes on with the new engine"
        answers = []

        def served() -> bool:
            answers.append(client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}))
            return answers[-1].status_code == 200

        wait_until(served, 20, "the engine's return")
        assert {answer.status_code for answer in answers[:-1]} <= {503}
        if processes == "1":
            server.wait_log("is connected again")
            phases = re.findall(r" s\] (engine: .*)", server.log)
            assert len(phases) == 2 * len(set(phases)), "the last phase of a start ends with it"
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_requests_that_brought_nothing_are_sent_to_the_engine_that_takes_over(processes):
    arguments = ("--restart-engine", "1", "--max-num-seqs", "1", "--api-server-count", processes)
    with (
        serving(*arguments, null_model=SLOW) as server,
        server.client() as client,
        server.client() as other,
        server.client() as watcher,
    ):
        asked = {"prompt": [7, 8], "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
        expected = other.post(COMPLETIONS, json=asked).json()["choices"][0]["logprobs"]["tokens"]
        with ThreadPoolExecutor(1) as pool:
            with streaming(client):  # has the only seat, and the next engine's too until its client leaves
                waiting = pool.submit(other.post, COMPLETIONS, json=asked, timeout=30)
                wait_until(lambda: metric(watcher, "headrace:num_requests_waiting") == 1, 30, "a request that waits")
                engine_of(server).kill()
                server.wait_log("waiting for an engine")
            answer = waiting.result(30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected


@pytest.mark.system
def test_a_request_that_kills_engines_is_sent_again_once():
    with serving("--restart-engine", "3", null_model={"crash_token_id": 9}) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [9], "max_tokens": 5}, timeout=30)
        assert answer.status_code in (500, 503)
        assert "told to crash" in answer.json()["error"]["message"]
        server.wait_log("1 waiting for an engine(.|\n)*starting the engine again")


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_an_engine_that_dies_too_often_ends_the_server_and_fails_what_waited_with_the_cause(processes):
    options = ("--restart-engine", "1", "--api-server-count", processes)
    with serving(*options, null_model={"crash_step": 1}) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 5}, timeout=30)
        assert "told to crash in step 1" in answer.json()["error"]["message"]
        assert server.wait_exit() == 70


@pytest.mark.parametrize(
    ("what", "processes"),
    [
        ("is gone", "1"),
        pytest.param("is gone", "2", marks=pytest.mark.system),
        pytest.param("is open to others", "1", marks=pytest.mark.system),
    ],
)
def test_a_restart_says_what_is_wrong_with_the_runtime_directory_and_the_server_still_stops(
    what, processes, runtime_directory
):
    options = ("--restart-engine", "9", "--api-server-count", processes)
    with serving(*options, null_model=SLOW) as server, server.client() as client:
        if what == "is gone":
            shutil.rmtree(runtime_directory)
        else:
            runtime_directory.chmod(0o755)
        engine_of(server).kill()
        if what == "is gone":  # it is made anew; a server that has seen the end refuses until then
            asked = {"prompt": [5], "max_tokens": 2}
            wait_until(lambda: client.post(COMPLETIONS, json=asked).status_code == 200, 30, "the next engine's answer")
        else:
            server.wait_log(f"the engine has ended: .*{runtime_directory} must be a directory of yours .*mode 0700")
        server.signal()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log
        runtime_directory.mkdir(exist_ok=True)  # for the fixture's end


# --- signals to all processes at once ------------------------------------------------------------------------------


def all_processes(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [*process.children(recursive=True), process]


def http_processes(server: Server) -> list[psutil.Process]:
    return [each for each in all_processes(server) if "headrace.frontend.http.process.worker" in each.cmdline()]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("two HTTP processes", signal.SIGTERM),
        pytest.param("two ranks", signal.SIGTERM, marks=pytest.mark.system),
        pytest.param("one process", signal.SIGHUP, marks=pytest.mark.system),
        pytest.param("two HTTP processes", signal.SIGHUP, marks=pytest.mark.system),
        pytest.param("two ranks", signal.SIGINT, marks=pytest.mark.system),
    ],
)
def test_a_signal_to_every_process_drains(kind, number):
    """As systemd sends it to a control group, and a terminal to its session that is closed, or is told Ctrl-C."""
    if kind == "two ranks":
        overrides = json.dumps({"step_delay_s": 0.01})
        arguments = ["null", "-tp", "2", "--worker-cls", "null_rank:NullRank", "--skip-tokenizer-init"]
        options: dict[str, object] = {"attached": True}  # the model is among the arguments
        arguments += ["--distributed-executor-backend", "mp", "--hf-overrides", overrides]
    else:
        arguments = ["--api-server-count", "2" if kind == "two HTTP processes" else "1"]
        options = {"null_model": SLOW}
    with serving(*arguments, **options) as server, contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(streaming(stack.enter_context(server.client()), max_tokens=60)) for _ in range(16)
        ]
        for process in all_processes(server):
            process.send_signal(number)
        for lines in streams:
            rest = [line for line in lines if line]
            assert '"finish_reason":"length"' in rest[-2]
            assert rest[-1] == "data: [DONE]"
        assert server.wait_exit() == 0


# --- HTTP processes that die or stop -------------------------------------------------------------------------------


@contextlib.contextmanager
def asking(server: Server) -> Iterator[list[int]]:
    """Meanwhile two clients ask, each time over a new connection. Gives the statuses of the answers."""
    statuses: list[int] = []
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            with server.client() as client:
                statuses.append(client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code)

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        try:
            yield statuses
        finally:
            ends.set()
        for each in asked:
            each.result()


def listens(process: psutil.Process) -> bool:
    return any(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp"))


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.system) for each in (signal.SIGTERM, signal.SIGHUP))],
)
def test_an_http_process_that_is_killed_is_started_again_and_the_others_serve_on(number):
    with serving("--api-server-count", "2", "-dp", "2", null_model=SLOW) as server:
        before = {process.pid for process in http_processes(server)}
        with server.client() as client, streaming(client, max_tokens=100) as lines:
            idle, _ = sorted(http_processes(server), key=lambda process: len(process.net_connections("tcp")))
            idle.send_signal(number)
            if number is signal.SIGKILL:
                server.wait_log("an HTTP process has ended and is started again")
            assert [line for line in lines if line][-1] == "data: [DONE]"

        def both_serve() -> bool:
            processes = http_processes(server)
            if number is signal.SIGKILL and len({process.pid for process in processes} - before) != 1:
                return False
            return len(processes) == 2 and all(map(listens, processes))

        with asking(server) as answers:
            wait_until(both_serve, 20, "a successor that listens")
            num_before = len(answers)
            wait_until(lambda: len(answers) > num_before + 40, 20, "answers of both")
        assert set(answers) == {200}  # the successor gets no connection before it can answer
        with server.client() as client:  # a process counts a request until it runs again after the answer
            wait_until(lambda: client.get("/load").json() == {"server_load": 0}, 20, "no request to be counted")
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.system
def test_an_http_process_that_stays_stopped_is_told_and_replaced():
    """It would still get its share of the connections, which wait."""
    with serving("--api-server-count", "2", "--peer-timeout", "1", null_model=SLOW) as server:
        before = {process.pid for process in http_processes(server)}
        stopped = min(before)
        os.kill(stopped, signal.SIGSTOP)
        server.wait_log(rf"\(pid {stopped}\) is stopped by a signal or a debugger; its connections wait")
        server.wait_log("an HTTP process has ended and is started again")
        wait_until(lambda: len({process.pid for process in http_processes(server)} - before) == 1, 20, "its successor")
        wait_until_all(server, "/health/ready", 200)
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.system
def test_an_http_process_killed_while_it_drains_is_told_in_the_exit_status():
    with serving("--api-server-count", "2", null_model=SLOW) as server, server.client() as client:
        with contextlib.suppress(Exception), streaming(client, max_tokens=3000) as lines:
            server.signal()
            server.wait_log("stopping; ")
            for process in http_processes(server):
                process.kill()
            list(lines)
        assert server.wait_exit() == 1
        assert "did not finish what it served" in server.log


# --- who is stopped is not dead ------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(("who", "processes"), [("engine", "1"), ("server", "2")])
def test_a_pause_of_seconds_loses_nothing_and_changes_nothing(who, processes):
    options = ("--restart-engine", "2", "--api-server-count", processes)
    with serving(*options, null_model=SLOW) as server, server.client() as client:
        asked = {"prompt": [7, 8], "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 3}
        with server.client() as other:
            expected = other.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
        engine = engine_of(server).pid
        with streaming(client, **asked) as lines:
            paused = [engine] if who == "engine" else [p.pid for p in all_processes(server) if p.pid != engine]
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(6.0)  # longer than the heartbeats of before allowed
            if who == "engine":
                with server.client() as watcher:
                    wait_until(lambda: silent(watcher), 30, "health to tell of it")
                    assert watcher.get("/health/live").status_code == 200
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        with server.client() as other:
            assert other.post(COMPLETIONS, json=asked).json()["choices"][0]["text"] == expected
            wait_until(lambda: other.get("/health").status_code == 200, 30, "health")
        assert engine_of(server).pid == engine


@pytest.mark.system
@pytest.mark.parametrize(("who", "processes"), [("engine", "1"), ("server", "1"), ("engine", "2"), ("server", "2")])
def test_ten_pauses_leave_one_engine_and_neither_lose_nor_change_a_stream(who, processes):
    options = ("--restart-engine", "2", "--api-server-count", processes, "--peer-timeout", "30")
    asked = [
        {"prompt": [7, each], "max_tokens": 400, "ignore_eos": True, "temperature": 1, "seed": each}
        for each in range(8)
    ]
    with serving(*options, null_model={"step_delay_s": 0.002}) as server, contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(asked)))
        clients = [stack.enter_context(server.client()) for _ in asked]
        begun: queue.SimpleQueue[int] = queue.SimpleQueue()

        def text_of(number: int) -> str:
            texts = list[str]()
            with clients[number].stream("POST", COMPLETIONS, json={**asked[number], "stream": True}) as response:
                assert response.status_code == 200, response.read()
                for event in events_of(response):
                    if not texts:
                        begun.put(number)
                    texts.append(event["choices"][0]["text"])
            return "".join(texts)

        def until_all_have_begun() -> None:
            for _ in asked:
                begun.get(timeout=60)

        expected = list(pool.map(text_of, range(len(asked))))
        until_all_have_begun()
        assert len(set(expected)) == len(asked)
        engine = engine_of(server).pid
        paused = [engine] if who == "engine" else [p.pid for p in all_processes(server) if p.pid != engine]
        for pause in range(10):
            streams = [pool.submit(text_of, number) for number in range(len(asked))]
            until_all_have_begun()
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(5.5 if pause == 0 else 0.3)  # once for longer than silence that health tells of
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
            assert [stream.result(60) for stream in streams] == expected
        assert engine_of(server).pid == engine, "one engine, and the same"
        with server.client() as watcher:
            wait_until(lambda: watcher.get("/health").status_code == 200, 30, "health")
        server.signal()
        assert server.wait_exit() == 0
        assert "the engine has ended" not in server.log
        assert "is started again" not in server.log


def silent(client: Any) -> bool:
    answers = [client.get("/health") for _ in range(4)]
    return any(answer.status_code == 503 and answer.json()["error"]["code"] == "engine_silent" for answer in answers)


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_engine_that_stays_silent_is_ended_before_another_is_started(processes):
    options = ("--restart-engine", "5", "--api-server-count", processes, "--peer-timeout", "2")
    with serving(*options, null_model=SLOW) as server:
        for _ in range(2):
            before = engine_of(server)
            before.suspend()
            wait_until(lambda before=before: not before.is_running(), 20, "the silent engine's end")
            wait_until(lambda: served_by_one(server), 20, "the next engine")
            engine_of(server)  # which finds one alone
        server.signal()
        assert server.wait_exit() == 0


# --- logs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [pytest.param("broken", marks=pytest.mark.system), "unread"])
def test_a_log_that_cannot_be_written_stops_nothing(log):
    """What reads it has ended, or nobody reads: the engine's death is noticed all the same."""
    server = Server("--restart-engine", "2", "--enable-log-requests", null_model={**SLOW})
    try:
        server.wait_ready()
        assert server.process.stderr is not None
        if log == "broken":
            server.process.stderr.close()
        with server.client() as client:
            for _ in range(800 if log == "unread" else 10):
                assert client.get("/a" * 100).status_code == 404
            engine = engine_of(server)
            engine.kill()
            wait_until(lambda: not engine.is_running() and served_by_one(server), 20, "the next engine")
            assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200
        server.signal()
        assert server.process.wait(within(20)) == 0
    finally:
        server.process.kill()
        server.process.wait()


def served_by_one(server: Server) -> bool:
    with server.client() as client:
        return bool(client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200)
