"""Engines come to a live service and leave it, and no stream is lost or changed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from http_server import Server, metric, serving
from null_with_tokenizer import LATE, MISSABLE
from patience import wait_until, within
from test_serve_fleet import engines_of, stream, undisturbed
from test_supervisor import SERVES

from headrace.core.options.parsing import parse_options
from headrace.core.process.child import Child
from headrace.frontend.cli.main import main
from headrace.frontend.fleet import scaling
from headrace.frontend.fleet.directory import FORGET_AFTER_S
from headrace.frontend.fleet.scaling import ENGINES_PER_CORE
from headrace.frontend.fleet.start import of_rank
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.ranks import Ranks, why_fixed
from headrace.frontend.http.process.supervisor import _Engine, _Service
from headrace.ipc.coordination import LEASE_S
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import SCHEMA_HASH, Start
from headrace.ipc.process.host import HostMemory, usable_cores
from headrace.ipc.process.proc import anonymous_bytes

SLOW = {"step_delay_s": 0.02}


def scale(server: Server, size: int, drain_timeout: float = 60.0) -> None:
    with server.client() as client:
        body = {"new_data_parallel_size": size, "drain_timeout": drain_timeout}
        answer = client.post("/scale_elastic_ep", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"message": f"Scaled to {size} data parallel engines"}


def streams_on_both(pool: ThreadPoolExecutor, server: Server) -> list[Future[dict[int, list[str]]]]:
    """Half on each engine by name: the router gives all to one where a busy machine makes the other slower."""
    return [pool.submit(stream, server, each, data_parallel_rank=each % 2) for each in range(6)]


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_engines_leave_and_join_under_streams_that_do_not_change(processes: str) -> None:
    arguments = ("-dp", "2", "--api-server-count", processes)
    with serving(*arguments, null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()
        streams = streams_on_both(pool, server)
        wait_until(lambda: client.get("/load").json()["server_load"] == 6, 30, "all to run")
        scale(server, 1, drain_timeout=0.5)  # its requests need six seconds: others go on with them
        assert [each.result(60) for each in streams] == expected
        wait_until(lambda: len(engines_of(server)) == 1, 30, "one to be left")
        assert metric(client, "headrace:router_migrations_total") > 0
        scale(server, 3)
        wait_until(lambda: len(engines_of(server)) == 3, 30, "three to be there")
        wait_until(lambda: metric(client, "headrace:engine_up") == 3, 20, "all to be seen")
        assert list(pool.map(lambda each: stream(server, each), range(6))) == expected
        assert client.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
        assert client.post("/scale_elastic_ep", json={"new_data_parallel_size": 0}).status_code == 400
        for size in (ENGINES_PER_CORE * usable_cores() + 1, 1024):
            refused = client.post("/scale_elastic_ep", json={"new_data_parallel_size": size})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "new_data_parallel_size")
            assert f"the {usable_cores()} cores of this machine take at most" in refused.json()["error"]["message"]
        assert len(engines_of(server)) == 3


def test_more_engines_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own_bytes = anonymous_bytes(os.getpid())
    assert own_bytes > 1 << 20
    monkeypatch.setattr(scaling, "host_memory", lambda: HostMemory(8 * own_bytes, int(2.5 * own_bytes)))
    monkeypatch.setattr(scaling, "usable_cores", lambda: 64)

    pids = [os.getpid()]
    for size, num_at_start in ((1, 1), (3, 1), (9, 9)):
        asyncio.run(scaling.check_room(size, pids, num_at_start))
    with pytest.raises(OptionError, match=r"size is 4; 3 more engines take .* GB of memory.* this machine has"):
        asyncio.run(scaling.check_room(4, pids, 1))
    with pytest.raises(OptionError, match=r"the 64 cores of this machine take at most 256 engines"):
        asyncio.run(scaling.check_room(257, pids, 1))


def test_commands_drain_an_engine_and_scale_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("-dp", "2", null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()[:4]
        streams = [pool.submit(stream, server, each) for each in range(4)]
        wait_until(lambda: client.get("/load").json()["server_load"] == 4, 30, "all to run")
        address = next(
            line.laddr for engine in engines_of(server)[:1] for line in engine.net_connections("unix") if line.laddr
        )
        assert main(["drain", f"ipc://{address}", "--timeout", "0.5"]) == 0
        assert "has left" in capsys.readouterr().out
        assert [each.result(60) for each in streams] == expected
        wait_until(lambda: metric(client, "headrace:engine_up") == 1, 30, "the pool to be smaller")
        server.wait_log(rf"engine [01] at ipc://{address} left, as it was asked to")
        assert "connection was lost" not in server.log
        assert main(["scale", "2", "--url", server.url]) == 0
        assert "Scaled to 2" in capsys.readouterr().out
        assert metric(client, "headrace:engine_up") == 2
        server.wait_log(r"engine [01] at ipc://\S+ is connected\n")


@pytest.mark.system
def test_a_pause_holds_the_streams_of_all_engines_and_moves_none() -> None:
    arguments = ("-dp", "2", "--server-dev-mode")
    with serving(*arguments, null_model=SLOW) as server, server.client() as client, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()
        streams = streams_on_both(pool, server)
        running = [{"engine": str(rank)} for rank in range(2)]
        wait_until(
            lambda: all(metric(client, "headrace:num_requests_running", **each) for each in running), 10, "both to work"
        )
        assert client.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        try:
            num_tokens = metric(client, "headrace:generation_tokens_total")
            time.sleep(3.0)  # longer than an engine may be silent
            assert metric(client, "headrace:generation_tokens_total") == num_tokens
        finally:
            assert client.post("/resume").json() == {"status": "resumed"}
        assert [each.result(60) for each in streams] == expected
        assert metric(client, "headrace:router_migrations_total") == 0


def test_engines_that_start_while_the_server_is_paused_are_paused_too() -> None:
    arguments = ("--restart-engine", "2", "--server-dev-mode")
    with serving(*arguments, null_model={}) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        expected = undisturbed()
        assert client.post("/pause?mode=keep").json() == {"status": "paused"}
        (engine,) = engines_of(server)
        engine.kill()
        server.wait_log("is connected again")
        scale(server, 2)
        streams = [pool.submit(stream, server, each, data_parallel_rank=each) for each in range(2)]
        try:
            for rank, each in enumerate(streams):
                num_waiting = functools.partial(metric, client, "headrace:num_requests_waiting", engine=str(rank))
                wait_until(lambda it=each, look=num_waiting: it.done() or look() > 0, 30, "it to wait")
            assert metric(client, "headrace:generation_tokens_total") == 0
        finally:
            assert client.post("/resume").json() == {"status": "resumed"}
        assert [each.result(60) for each in streams] == expected[:2]


def test_engines_of_others_are_not_scaled() -> None:
    with serving(null_model={}) as owner, owner.client() as client:
        (engine,) = engines_of(owner)
        address = next(line.laddr for line in engine.net_connections("unix") if line.laddr)
        with serving("--engine", f"ipc://{address}", attached=True) as server, server.client() as attached:
            refused = attached.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_scalable")
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.system)])
def test_a_death_that_nobody_has_noticed_yet_is_none_of_those_that_stay(processes: str) -> None:
    arguments = ("-dp", "2", "--restart-engine", "0", "--api-server-count", processes)
    with serving(*arguments, null_model={}) as server:
        expected = stream(server, 1)
        survivor = kill_rank(server, 0)
        scale(server, 1)
        assert [each.pid for each in engines_of(server)] == [survivor]
        assert stream(server, 1) == expected


@pytest.mark.system
def test_no_engine_returns_that_was_to_be_restarted_when_it_was_removed() -> None:
    """The pause before its restart goes on while another engine gets its rank."""
    arguments = ("-dp", "2", "--restart-engine", "10", "--api-server-count", "2")
    with serving(*arguments, null_model={}) as server, server.client() as client:
        for _ in range(4):  # each pause is twice as long
            wait_until(lambda: metric(client, "headrace:engine_up") == 2, 60, "both to serve")
            kill_rank(server, 1)
            wait_until(lambda: metric(client, "headrace:engine_up") == 1, 30, "the death to be seen")
        scale(server, 1)
        scale(server, 2)
        engines = {each.pid for each in engines_of(server)}
        assert len(engines) == 2
        end_s = time.monotonic() + 2.5  # the pause is 2 s
        while time.monotonic() < end_s:
            assert {each.pid for each in engines_of(server)} == engines
            time.sleep(0.1)


@pytest.mark.system
def test_a_scaling_that_the_end_of_the_server_overtakes_says_so() -> None:
    with serving("-dp", "1", null_model={"load_delay_s": 3.0}) as server:
        with ThreadPoolExecutor(1) as pool, server.client() as client:
            body = {"new_data_parallel_size": 3}
            scaling = pool.submit(lambda: client.post("/scale_elastic_ep", json=body, timeout=120))
            wait_until(lambda: len(engines_of(server)) == 2, 30, "the second engine to be started")
            server.signal()
            refused = scaling.result(60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down"), refused.text
        assert server.wait_exit(30) == 0
        assert "Traceback" not in server.log


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_engines_wait_for_a_model_whose_files_are_away_for_a_moment(processes: str, tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    arguments = (str(model), "-dp", "2", "--api-server-count", processes, "--max-model-len", "256")
    with serving(*arguments, "--num-gpu-blocks-override", "64", attached=True) as server, server.client() as client:
        model.rename(tmp_path / "away")
        survivor = kill_rank(server, 1)
        server.wait_log("has ended: .*(no such|is not|does not exist|there is no)")
        refused = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3}, timeout=120)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "scaling_failed")
        assert "there is 1 engine" in refused.json()["error"]["message"]
        (tmp_path / "away").rename(model)
        scale(server, 2)
        assert survivor in [each.pid for each in engines_of(server)]


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_engines_that_are_started_later_have_the_weights_that_the_others_read_again(
    processes: str, tmp_path: Path
) -> None:
    one, other = (tiny_models.save("llama", tmp_path / str(seed), seed, tokenizer=True) for seed in range(2))
    arguments = (str(one), "-dp", "2", "--api-server-count", processes, "--max-model-len", "256", "--server-dev-mode")
    asked = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with (
        serving(*arguments, "--num-gpu-blocks-override", "64", attached=True) as server,
        server.client() as client,
    ):

        def answers(num_engines: int) -> set[str]:
            wait_until(lambda: metric(client, "headrace:engine_up") == num_engines, 60, "all to serve")
            return {
                client.post("/v1/completions", json={**asked, "data_parallel_rank": rank}).json()["choices"][0]["text"]
                for rank in range(num_engines)
            }

        (before,) = answers(2)
        assert client.post("/reload_weights", params={"weights_path": str(other)}).status_code == 200
        (expected,) = answers(2)
        assert expected != before
        kill_rank(server, 0)
        wait_until(lambda: metric(client, "headrace:engine_up") == 1, 30, "the death to be seen")
        assert answers(2) == {expected}
        scale(server, 3)
        assert answers(3) == {expected}
        assert client.post("/reload_weights").status_code == 200
        kill_rank(server, 0)
        wait_until(lambda: metric(client, "headrace:engine_up") == 2, 30, "the death to be seen")
        assert answers(3) == {before}


@pytest.mark.parametrize(
    ("options", "ranks", "num_processes", "said"),
    [
        ({}, Ranks(range(0)), 1, "somebody else's"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, Ranks(range(2)), 1, "placement group of Ray"),
        ({"data_parallel_size": 2, "data_parallel_meeting": "a"}, Ranks(range(2)), 2, "divide the experts"),
        ({"data_parallel_size": 4}, Ranks(range(2), "tcp://host:1"), 1, "several hosts"),
        ({}, Ranks(range(1)), 2, "data_parallel_size=2 or more, or with api_server_count=1"),
        ({}, Ranks(range(1)), 1, ""),
        ({"data_parallel_size": 2}, Ranks(range(2)), 2, ""),
    ],
)
def test_where_the_number_is_fixed_the_right_reason_is_given(
    options: dict[str, Any], ranks: Ranks, num_processes: int, said: str
) -> None:
    reason = why_fixed(parse_options(model="null", **options), ranks, num_processes)
    assert said in reason
    assert bool(said) == bool(reason)


def test_the_reason_comes_over_http_and_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("--api-server-count", "2", null_model={}) as server, server.client() as client:
        refused = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_scalable")
        assert "api_server_count=1" in refused.json()["error"]["message"]
        for size, said in (("2", "api_server_count=1"), ("0", "new_data_parallel_size")):
            assert main(["scale", size, "--url", server.url]) != 0
            told = capsys.readouterr()
            assert said in told.err
            assert "Traceback" not in told.err + told.out
        assert main(["scale", "2", "--url", "http://127.0.0.1:9"]) != 0
        assert "127.0.0.1:9" in capsys.readouterr().err


def kill_rank(server: Server, rank: int) -> int:
    """Kills the engine of this rank, by the order of their starts, and returns the process id of the other."""
    engines = sorted(engines_of(server), key=lambda each: each.create_time())
    engines[rank].kill()
    return engines[1 - rank].pid


@pytest.mark.parametrize(
    ("processes", "rank"),
    [
        ("1", 1),
        pytest.param("2", 0, marks=pytest.mark.system),
        pytest.param("1", 0, marks=pytest.mark.system),
        pytest.param("2", 1, marks=pytest.mark.system),
    ],
)
def test_scaling_down_takes_the_dead_and_leaves_those_that_serve(processes: str, rank: int) -> None:
    arguments = ("-dp", "2", "--restart-engine", "0", "--api-server-count", processes)
    with serving(*arguments, null_model={}) as server, server.client() as client:
        expected = stream(server, 1)
        survivor = kill_rank(server, rank)
        wait_until(lambda: metric(client, "headrace:engine_up") == 1, 30, "the death to be seen")
        scale(server, 1)
        assert [each.pid for each in engines_of(server)] == [survivor]
        assert stream(server, 1) == expected
        scale(server, 2)
        assert len(engines_of(server)) == 2
        assert survivor in [each.pid for each in engines_of(server)]


@pytest.mark.system
@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.system), "2"])
def test_a_scaling_that_fails_leaves_nothing_that_counts_and_can_be_tried_again(
    processes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setenv("HEADRACE_TEST_MODEL_FOLDER", str(folder))
    arguments = ("-dp", "2", "--api-server-count", processes, "--distributed-executor-backend", MISSABLE)
    with serving(*arguments, null_model={}) as server, server.client() as client:
        expected = stream(server, 1)
        folder.rmdir()
        for _ in range(2):
            refused = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 4}, timeout=120)
            assert refused.status_code == 503, refused.text
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("scaling_failed", "server_error")
            assert "the model's folder is away" in error["message"]
            assert "there are 2" in error["message"]
            wait_until(lambda: len(client.get("/ui/live").json()["engines"]) == 2, 20, "the failed one to be gone")
        assert stream(server, 1) == expected
        folder.mkdir()
        scale(server, 3)
        assert len(engines_of(server)) == 3
        scale(server, 1)
        assert len(engines_of(server)) == 1
        assert stream(server, 1) == expected


@pytest.mark.system
def test_streams_wait_for_engines_that_start_for_longer_than_they_are_remembered() -> None:
    """All engines have died, and all are started again. HTTP processes know of them by the coordinator alone."""
    model = {**SLOW, "load_delay_s": 1.2 * (LEASE_S + FORGET_AFTER_S)}
    with serving("-dp", "2", "--api-server-count", "2", null_model=model) as server, server.client() as client:
        wait_until(lambda: metric(client, "headrace:engine_up") == 2, 60, "both to serve")
        expected = stream(server, 1)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(stream, server, 1)
            wait_until(lambda: client.get("/load").json()["server_load"] == 1, 30, "it to run")
            for engine in engines_of(server):
                engine.kill()
            assert again.result(240) == expected


@pytest.mark.system
def test_two_scalings_at_once_both_end() -> None:
    with serving("-dp", "2", null_model={}) as server, ThreadPoolExecutor(2) as pool:
        wanted = [pool.submit(scale, server, size) for size in (3, 1)]
        for each in wanted:
            each.result(120)
        assert len(engines_of(server)) in (1, 3)


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_engine_that_dies_while_it_joins_ends_no_stream(processes: str) -> None:
    model = {"load_delay_s": 3.0, **SLOW}
    arguments = ("-dp", "2", "--api-server-count", processes)
    with serving(*arguments, null_model=model) as server, ThreadPoolExecutor(1) as pool:
        expected = undisturbed()[1]
        running = pool.submit(stream, server, 1)
        scaling = ThreadPoolExecutor(1).submit(scale, server, 3)
        wait_until(lambda: len(engines_of(server)) == 3, 30, "the third to be started")
        newest = max(engines_of(server), key=lambda each: each.create_time())
        newest.kill()
        with pytest.raises(AssertionError, match="there are 2"):
            scaling.result(120)
        assert running.result(60) == expected
        assert len(engines_of(server)) == 2


@pytest.mark.system
@pytest.mark.parametrize("processes", ["1", "2"])
def test_once_a_server_serves_no_engine_that_dies_in_its_start_ends_it(
    processes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server serves from its first engine on, also while its parent process, which nobody lets run, knows neither
    that this engine is ready nor that the HTTP processes are."""
    monkeypatch.setenv("HEADRACE_TEST_MODEL_FOLDER", f"{tmp_path}/model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("-dp", "2", "--api-server-count", processes, "--port", str(port))
    server = Server(*arguments, "--distributed-executor-backend", LATE, null_model=SLOW)
    server.url = f"http://127.0.0.1:{port}"
    try:
        expected = undisturbed()[1]
        wait_until(lambda: _health(server) == 503 and len(engines_of(server)) == 2, 60, "the server to listen")
        second = max(engines_of(server), key=lambda each: (each.create_time(), each.pid))
        if processes == "2":
            server.signal(signal.SIGSTOP)
        (tmp_path / "model0").mkdir()
        # Each HTTP process learns of the engine by itself, and a connection may come to any.
        wait_until(lambda: {_health(server) for _ in range(20)} == {200}, 60, "the first engine to serve")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stream, server, 1)
            second.kill()
            server.signal(signal.SIGCONT)
            assert running.result(60) == expected
        (tmp_path / "model1").mkdir()
        server.wait_log("has ended")
        with server.client() as client:
            wait_until(lambda: metric(client, "headrace:engine_up") == 2, 60, "the second engine to serve")
        assert stream(server, 1) == expected
    finally:
        server.close()


def test_a_death_whose_news_come_before_those_of_another_engines_start_ends_no_server() -> None:
    """Clients may have requests at an engine whose Ready has come and that nothing in the parent has looked at."""
    options = parse_options(model="null", data_parallel_size=2, coordinator=("tcp://127.0.0.1:9",))
    start = Start(schema_hash=SCHEMA_HASH, options={}, bind="")
    serving, dead = Child("engine-core", ["-c", SERVES], start), Child("engine-core", ["-c", "exit(3)"], start)
    engines = [_Engine(of_rank(options, rank), 0, child) for rank, child in enumerate((serving, dead))]

    async def hear_of_the_death_first() -> int:
        service = _Service(ServeOptions(), engines, options, 1, None, Ranks(range(2)))
        try:
            running = asyncio.create_task(service.run())
            await asyncio.sleep(0)
            engines[0].keeping.cancel()  # so that nobody here learns that it is ready
            await wait_for(lambda: engines[1].is_over or running.done())
            service.stop()
            return await running
        finally:
            service.close()

    try:
        serving.wait_ready(30)
        assert asyncio.run(hear_of_the_death_first()) == 0
    finally:
        serving.kill()


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(within(30)):
        while not condition():
            await asyncio.sleep(0.01)


def _health(server: Server) -> int:
    try:
        with server.client() as client:
            return client.get("/health").status_code
    except httpx.TransportError:
        return 0
