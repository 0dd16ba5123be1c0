"""Starts, drains, deaths, disconnects: what a server does when something ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from fleet_parts import Session
from http_server import (
    Server,
    address_of_engine,
    engine_of,
    events_of,
    metric,
    null_engine_arguments,
    processor_share,
    refuses,
    serving,
)
from null_with_tokenizer import BACKEND, HANGING
from patience import wait_until, within
from server_here import process_unchanged

from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.scaling import EngineScaler, PoolEngines, Scaler
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process import server as server_process
from headrace.frontend.http.process.server import HttpServer, listen, url_of
from headrace.frontend.http.process.worker import ParentEngine
from headrace.frontend.http.server.metrics import Pages

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True}
REQUEST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
SLOW = {"step_delay_s": 0.01}


@contextlib.contextmanager
def streaming(client: httpx.Client, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with client.stream("POST", COMPLETIONS, json={**ENDLESS, **more, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    with serving("--max-num-seqs", "8", "--max-waiting-requests", "2", null_model=SLOW) as server:
        yield server


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_phases_sum_to_the_time_until_the_address(processes):
    untold_s = 1.0
    for _ in range(3):  # a busy machine may take its time between their clock and this one
        began_s = time.time()
        with serving("--api-server-count", processes) as server:
            wall_s = time.time() - began_s
            phases = [float(seconds) for seconds in re.findall(r"\[ *([\d.]+) s\]", server.log)]
            (total,) = re.findall(r"ready: .* \(([\d.]+) s\)", server.log)
            assert len(phases) >= 5, server.log
            assert sum(phases) == pytest.approx(float(total), abs=0.02)
            untold_s = abs(wall_s - float(total))
        if untold_s <= 0.15:
            break
    assert untold_s <= within(0.15)


_HI = {"messages": [{"role": "user", "content": "hi"}]}
WHILE_LOADING = {
    "/v1/chat/completions": _HI,
    "/v1/messages": {**_HI, "max_tokens": 1},
    "/v1/messages/count_tokens": _HI,
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/chat": {**_HI, "model": "null"},
    "/api/generate": {"prompt": "hi", "model": "null"},
    "/api/show": {"model": "null"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/lora-adapters": [{"id": 0, "scale": 1.0}],
}


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.system), "2"])
def test_a_server_that_loads_says_so_and_is_not_ready(processes):
    options = ("--port", "0", "--api-server-count", processes, "--allow-runtime-lora-updating")
    server = Server(*options, null_model={"load_delay_s": 60})
    try:
        server.wait_log("load weights|allocate|read config")
        wait_until(lambda: len(set(listening_ports(server))) == 1, 30, "listening")
        (port,) = set(listening_ports(server))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/health/live").status_code == 200
            refused = client.get("/health/ready")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            body = client.post(COMPLETIONS, json={"prompt": [5]})
            assert body.status_code == 503
            assert body.json()["error"]["code"] == "loading"
            for path in ("/v1/models", "/v1/models/null", "/api/tags", "/api/ps", "/lora-adapters"):
                asked = client.get(path)
                assert (asked.status_code, "still loading the model" in asked.text) == (503, True), path
            for path, content in WHILE_LOADING.items():
                asked = client.post(path, json=content)
                assert (asked.status_code, "still loading the model" in asked.text) == (503, True), path
        server.signal()
        assert server.wait_exit() == 0
    finally:
        server.close()


def test_a_server_told_to_stop_before_it_runs_ends_at_once() -> None:
    """As an HTTP process is whose parent is stopped while it still starts."""
    options = ServeOptions(port=0)
    with listen(options) as sock:
        server = HttpServer(options, sock, Pages())
        server.stop_threadsafe(30.0)
        assert asyncio.run(asyncio.wait_for(server.run([ParentEngine(lambda lost: None)]), within(10.0))) == 0


@pytest.mark.parametrize("others_serve", [False, True])
def test_one_http_process_of_several_is_ready_once_it_is_connected_to_all_engines(
    others_serve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the death of the one it knows would cost requests, while others serve. Where other processes answer already
    it gets no connections before."""
    monkeypatch.setattr(server_process, "MEETS_WITHIN_S", 600.0)  # the looks of a busy machine take longer than 5 s
    engines = [EngineThread(parse_options(model="null", distributed_executor_backend=BACKEND)) for _ in range(2)]
    pools: list[EnginePool] = []
    ready = asyncio.Event()

    def keep_pool(pool: EnginePool) -> Scaler:
        pools.append(pool)
        return EngineScaler(PoolEngines(pool, 0), parse_options(model="null"))

    async def serve(server: HttpServer, url: str) -> None:
        async def listens() -> bool:
            try:
                async with httpx.AsyncClient() as client:
                    return (await client.get(f"{url}/ping")).status_code < 500
            except httpx.ConnectError:
                return False

        async def is_early() -> bool:
            for _ in range(20):  # of its looks
                await asyncio.sleep(0.02)
                if ready.is_set() or (others_serve and await listens()):
                    return True
            return False

        running = asyncio.create_task(server.run([Session(engines[0])]))
        while not pools:
            await asyncio.sleep(0.01)
        (pool,) = pools
        await asyncio.wait_for(pool.started.wait(), within(30.0))
        assert not await is_early()  # it is still to be told
        server.num_met = 2
        assert not await is_early()
        pool.add(Session(engines[1]))
        await asyncio.wait_for(ready.wait(), within(30.0))
        while not await listens():
            await asyncio.sleep(0.01)
        server.stop(0.0)
        assert await asyncio.wait_for(running, within(30.0)) == 0

    options = ServeOptions(port=0)
    try:
        with listen(options) as sock, process_unchanged():
            server = HttpServer(options, sock, Pages())
            server.on_ready, server.scaler_of = ready.set, keep_pool
            server.num_met, server.others_serve = None, others_serve
            asyncio.run(serve(server, url_of(options, sock)))
    finally:
        for engine in engines:
            engine.stop()


def listening_ports(server: Server) -> list[int]:
    process = psutil.Process(server.process.pid)
    connections = [each for one in (process, *process.children()) for each in one.net_connections("tcp")]
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_an_engine_that_cannot_start_ends_the_server_with_its_cause(processes):
    server = Server("--distributed-executor-backend", "nowhere:Nothing", "--api-server-count", processes)
    assert server.wait_exit(30) == 1
    assert "nowhere:Nothing" in server.log


@pytest.mark.system
def test_an_engine_that_is_stopped_for_seconds_loses_nothing_and_changes_nothing(slow_server):
    """As by a debugger, swapping or a virtual machine's pause. test_http_restart.py has more such pauses."""
    asked = {"prompt": [7, 8], "max_tokens": 150, "ignore_eos": True, "temperature": 1, "seed": 3}

    def is_told() -> bool:
        time.sleep(0.1)  # processor time is for others
        answer = other.get("/health")
        return answer.status_code == 503 and answer.json()["error"]["code"] == "engine_silent"

    with slow_server.client() as client, slow_server.client() as other:
        expected = other.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
        engine = engine_of(slow_server)
        with client.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as response:
            parts = response.iter_raw()
            first = next(parts)
            engine.suspend()
            try:
                wait_until(is_told, 20, "health to tell of it")
                assert other.get("/health/live").status_code == 200
            finally:
                engine.resume()
            told = httpx.Response(200, content=first + b"".join(parts))
            assert "".join(event["choices"][0]["text"] for event in events_of(told)) == expected
        assert other.post(COMPLETIONS, json=asked).json()["choices"][0]["text"] == expected
        wait_until(lambda: other.get("/health").status_code == 200, 10, "health")
        assert engine_of(slow_server).pid == engine.pid


@pytest.mark.parametrize("how", ["stream", "whole"])
def test_a_client_that_leaves_is_aborted_at_once(slow_server, how):
    with slow_server.client() as watcher:
        if how == "stream":
            with slow_server.client() as client, streaming(client):
                assert metric(watcher, "headrace:num_requests_running") == 1
        else:
            with slow_server.client() as client, pytest.raises(httpx.ReadTimeout):
                client.post(COMPLETIONS, json=ENDLESS, timeout=httpx.Timeout(30, read=0.3))
        left_s = time.monotonic()
        wait_until(lambda: metric(watcher, "headrace:num_requests_running") == 0, 30, "the abort")
        assert time.monotonic() - left_s < within(1.0)
        assert metric(watcher, "headrace:kv_cache_usage_perc") == 0


def test_what_is_computed_for_nobody_is_counted():
    """The step that is under way when a client leaves brings a token that nobody wants."""
    # A step so long that a busy machine tells the engine of it within the step.
    with serving(null_model={"step_delay_s": 2.0}) as server, server.client() as watcher:
        with server.client() as client, streaming(client):
            assert metric(watcher, "headrace:tokens_after_disconnect_total") == 0
        wait_until(lambda: metric(watcher, "headrace:tokens_after_disconnect_total") == 1, 30, "the step's end")
        assert metric(watcher, "headrace:http_disconnects_total") == 1


def test_two_requests_of_one_name_are_both_answered(slow_server):
    with slow_server.client() as client, streaming(client, request_id="twin") as lines, slow_server.client() as other:
        answer = other.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "request_id": "twin"})
        assert answer.status_code == 200
        assert next(line for line in lines if line).startswith("data: "), "the first goes on"


def test_a_full_queue_answers_429_with_a_time_to_come_back(slow_server):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(streaming(stack.enter_context(slow_server.client())))
        with slow_server.client() as watcher:

            async def crowd() -> list[httpx.Response]:
                async with httpx.AsyncClient(base_url=slow_server.url, timeout=30) as client:
                    waiting = [
                        asyncio.create_task(client.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 5}))
                        for _ in range(2)
                    ]
                    while metric(watcher, "headrace:num_requests_waiting") < 2:
                        assert not any(task.done() for task in waiting), "both wait"
                        await asyncio.sleep(0.01)
                    refused = [
                        await client.post(COMPLETIONS, json={"prompt": [5], "stream": stream})
                        for stream in (False, True)
                    ]
                    stack.close()
                    return [*refused, *await asyncio.gather(*waiting)]

            full = "headrace:admission_rejections_total"
            before = metric(watcher, full, reason="max_num_queued_reqs")
            whole, streamed, *served = asyncio.run(crowd())
            assert metric(watcher, full, reason="max_num_queued_reqs") == before + 2
    for refused in (whole, streamed):
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert [response.status_code for response in served] == [200, 200]


def test_one_of_several_prompts_that_fails_ends_the_stream_with_the_cause():
    with (
        serving("--max-num-batched-tokens", "32", null_model={"step_delay_s": 0.02, "fail_token_id": 77}) as server,
        server.client() as client,
    ):
        # The second prompt takes several steps of 32 tokens, so the first one streams by then.
        with streaming(client, prompt=[[5, 6], [77] * 200]) as lines:
            rest = [line for line in lines if line]
        assert "told to fail" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "the other's end")


def test_sigterm_drains():
    with serving(null_model=SLOW) as server, server.client() as client, server.client() as other:
        assert other.get("/health/ready").status_code == 200
        with streaming(client, max_tokens=100) as lines:
            server.signal()
            wait_until(lambda: refuses(server), 20, "the end of listening")
            refused = other.get("/health/ready")  # on a connection that was open before
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            with pytest.raises(httpx.ConnectError):
                other.get("/health/live")
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait_exit() == 0


def test_a_drain_ends_at_its_deadline_with_a_last_event():
    with serving("--shutdown-timeout", "0.3", null_model=SLOW) as server, server.client() as client:
        with streaming(client) as lines:
            server.signal()
            rest = [line for line in lines if line]
        assert "shut down" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait_exit() == 0


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_a_second_signal_does_not_wait(processes):
    with serving("--api-server-count", processes, null_model=SLOW) as server, server.client() as client:
        with streaming(client) as lines:
            server.signal()
            server.wait_log("stopping; ")
            server.signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait_exit() == 0


LONG_TEXT = ("a" * 19 + "b") * 5000
LONG_LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, {"prompt": LONG_TEXT}, id="a tokenizer"),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [USER], "chat_template": LONG_LOOP},
            id="a template",
            marks=pytest.mark.system,
        ),
    ],
)
def test_what_hangs_before_its_request_runs_holds_no_stop_up(path, body):
    """More than work at a time: the threads that wait for it are joined at the end, one piece of work after another."""
    arguments = ("--shutdown-timeout", "1", "--trust-request-chat-template")
    server = Server(*arguments, "--distributed-executor-backend", HANGING).wait_ready()
    with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=server.url, timeout=180) as client:
        before_s = processor_time(server.process.pid)
        asked = [pool.submit(client.post, path, json={"model": "null", **body}) for _ in range(12)]
        wait_until(lambda: processor_time(server.process.pid) > before_s + 1.0, 60, "work that hangs")
        wait_until(lambda: len(psutil.Process(server.process.pid).net_connections()) > 12, 60, "all requests")
        server.process.send_signal(signal.SIGTERM)
        try:
            assert server.process.wait(within(40)) == 0
        finally:
            server.process.kill()
        for each in asked:
            with contextlib.suppress(httpx.TransportError):  # it had not begun to be read
                answer = each.result()
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "shutting_down"


def processor_time(pid: int) -> float:
    """Of a process and all below it, in seconds."""
    found = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (found, *found.children(recursive=True)))


def test_several_processes_share_a_port_an_engine_and_metrics_and_no_port_with_another_server():
    with serving("--api-server-count", "2", null_model=SLOW) as server:
        for _ in range(40):  # each a connection of its own: the kernel deals them out
            with server.client() as client:
                assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200
        with server.client() as client:  # much that is new at once, for the engine's garbage collector to look at
            body = {"prompt": [5], "max_tokens": 2, "n": 128, "temperature": 1.0, "ignore_eos": True}
            assert client.post(COMPLETIONS, json=body).status_code == 200
        workers = [
            each for each in psutil.Process(server.process.pid).children() if "process.worker" in str(each.cmdline())
        ]
        pids = {worker.pid for worker in workers if worker.cpu_times().user > 0}
        assert len(pids) == 2
        with server.client() as client:
            for _ in range(4):
                assert metric(client, "headrace:http_requests_total") == 41
                assert metric(client, "headrace:e2e_request_latency_seconds_count") == 41
                assert metric(client, "headrace:num_clients") == 2
                assert metric(client, "headrace:engine_gc_pauses_total") > 0
                assert metric(client, "headrace:engine_gc_pause_seconds_total") > 0
        second = Server("--port", str(httpx.URL(server.url).port), "--api-server-count", "2")
        assert second.wait_exit() == 2
        assert "another program does; choose another --port" in second.log
        with server.client() as client, streaming(client, max_tokens=50) as lines:
            server.signal()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait_exit() == 0


def test_attached_servers_leave_the_engine_running_and_share_its_load():
    with serving(null_model=SLOW) as owner:
        address = address_of_engine(owner)
        with (
            serving("--engine", address, "--engine", address, attached=True) as server,
            server.client() as client,
        ):
            # Two sessions with one core count as two engines, so the second stream goes to the idle one.
            with streaming(client), server.client() as other, streaming(other), owner.client() as watcher:
                assert metric(watcher, "headrace:num_requests_running") == 2
                running = [server_engine_tokens(server, index) for index in ("0", "1")]
                assert all(count > 0 for count in running)
            server.signal()
            assert server.wait_exit() == 0
        with owner.client() as client:
            assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200


@pytest.mark.system
def test_of_two_engines_the_one_that_lives_is_named_and_serves():
    with serving("--served-model-name", "A") as first, serving("--served-model-name", "B") as second:
        engines = [option for each in (first, second) for option in ("--engine", address_of_engine(each))]
        with serving(*engines, attached=True) as server, server.client() as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["A", "B"]
            engine_of(first).kill()
            wait_until(lambda: client.get("/v1/models/A").status_code == 404, 30, "A's end")
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["B"]
            answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1})
            assert (answer.status_code, answer.json()["model"]) == (200, "B")


def server_engine_tokens(server: Server, index: str) -> float:
    with server.client() as client:
        wait_until(
            lambda: metric(client, "headrace:inter_token_latency_seconds_count", engine=index) > 0,
            5,
            f"tokens of engine {index}",
        )
        return metric(client, "headrace:inter_token_latency_seconds_count", engine=index)


def test_an_engine_that_can_never_be_used_fails_the_start():
    server = Server("--engine", "tcp://127.0.0.1", attached=True)
    assert server.wait_exit() == 1
    assert "is no address" in server.log


def test_options_of_an_engine_do_not_go_with_an_attached_one():
    server = Server("--engine", "ipc:///nonexistent/engine.sock", *null_engine_arguments(), attached=True)
    assert server.wait_exit() == 2
    assert "leave out" in server.log
    assert "--hf-overrides" in server.log


def test_a_frozen_engine_makes_no_progress():
    with (
        serving("--progress-timeout", "0.5", null_model={"step_delay_s": 1000}) as server,
        server.client() as client,
        server.client() as other,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.get("/health/progress").status_code == 200
        answer = pool.submit(other.post, COMPLETIONS, json=ENDLESS)
        wait_until(lambda: client.get("/health/progress").status_code == 503, 30, "the stall to be noticed")
        assert client.get("/health/live").status_code == 200
        engine_of(server).kill()
        assert answer.result(60).status_code == 503
        assert server.wait_exit() == 70


def test_random_disconnects_leave_nothing_behind():
    """No request, block, task or descriptor; the memory of a long run is a benchmark's business."""
    with serving("--max-num-seqs", "64", null_model={"step_delay_s": 0.001}) as server, server.client() as watcher:
        process, rng = psutil.Process(server.process.pid), random.Random(0)
        assert watcher.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200
        descriptors = process.num_fds()

        async def one(port: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":[5,6],"max_tokens":500,"stream":%b}' % rng.choice((b"true", b"false"))
            request = REQUEST_HEAD % len(body) + body
            writer.write(request[: rng.choice((len(request), len(request), rng.randrange(len(request))))])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(rng.choice((1, 2000, 20000))), rng.random() * 0.05)
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

        async def crowd() -> None:
            port = int(server.url.rsplit(":", 1)[1])
            for _ in range(8):
                await asyncio.gather(*(one(port) for _ in range(50)))

        asyncio.run(crowd())
        # Looked at from outside: to answer for its metrics again and again would keep the server from its work.
        wait_until(lambda: process.num_fds() <= descriptors, 60, "every connection to close")
        wait_until(lambda: metric(watcher, "headrace:num_requests_running") == 0, 60, "every abort")
        assert metric(watcher, "headrace:num_requests_waiting") == 0
        assert metric(watcher, "headrace:kv_cache_usage_perc") == 0
        assert metric(watcher, "headrace:http_disconnects_total") > 100
        assert watcher.get("/load").json() == {"server_load": 0}
        server.signal()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log, server.log


def test_a_thousand_streams_at_once():
    with serving("--max-num-seqs", "1024") as server:

        async def one(port: int, token_id: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":[5,%d],"max_tokens":8,"ignore_eos":true,"stream":true}' % token_id
            writer.write(REQUEST_HEAD % len(body) + body)
            text = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            return text

        async def crowd() -> list[bytes]:
            port = int(server.url.rsplit(":", 1)[1])
            return await asyncio.gather(*(one(port, 3 + index % 300) for index in range(1000)))

        for text in asyncio.run(crowd()):
            assert text.startswith(b"HTTP/1.1 200")
            assert text.count(b'"finish_reason":"length"') == 1
            assert b"data: [DONE]" in text
            assert b'"error"' not in text


def test_an_idle_server_uses_no_processor_time():
    """Under 1 % of a core, all processes together; benchmarks/disconnects.py has it over 10 s, of one process."""
    with serving("--api-server-count", "2") as server, server.client() as client:
        assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 4}).status_code == 200
        process = psutil.Process(server.process.pid)
        pids = [process.pid, *(each.pid for each in process.children(recursive=True))]
        shares: list[float] = []

        def at_rest() -> bool:
            shares.append(processor_share(pids, 1.0))
            return shares[-1] < 0.01

        wait_until(at_rest, 10, lambda: f"coming to rest {shares}")
