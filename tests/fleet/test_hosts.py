"""vLLM's options for engines on several hosts, all of which are this one: internal, hybrid, external balancing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import http_server
import psutil
import pytest
from http_server import Server, ask, metric, null_engine_arguments, serving
from patience import wait_until, within
from test_serve_fleet import stream, undisturbed
from zmtp_greeting import wants_keys

from headrace.core.options.option import Secret
from headrace.core.options.parsing import parse_options
from headrace.frontend.cli.main import main
from headrace.frontend.client.engine_watch import engine_addresses, look_at
from headrace.frontend.fleet.start import start_ranks
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.frontend.http.process.ranks import Ranks, ranks_of
from headrace.ipc.failure import OptionError

SLOW = {"step_delay_s": 0.02}
COMPLETIONS = "/v1/completions"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def headless(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(http_server.__file__).parent)}
    command = [sys.executable, "-m", "headrace", "serve", *null_engine_arguments(**SLOW), "--headless", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


def ranks_up(client: Any) -> list[int]:
    text = client.get("/metrics").text
    return [int(rank) for rank in re.findall(r'^headrace:engine_up\{[^}]*engine="(\d+)"[^}]*\} 1', text, re.MULTILINE)]


@pytest.mark.system
def test_engines_of_a_host_without_http_serve_with_those_of_the_first() -> None:
    common = ("-dp", "3", "-dpa", "127.0.0.1", "-dpp", free_port())
    with serving(*common, "-dpl", "1", null_model=SLOW) as server, server.client() as client:
        with headless(*common, "-dpl", "2", "-dpr", "1") as other, ThreadPoolExecutor(6) as pool:
            assert wants_keys(f"tcp://127.0.0.1:{common[-1]}"), "no other user may feed the coordinator"
            wait_until(lambda: ranks_up(client) == [0, 1, 2], 30, "the engines of the other host")
            expected = undisturbed()
            seen = asyncio.run(look_at(engine_addresses()))
            at_tcp = [each for each in seen if each.address.startswith("tcp://127.0.0.1:")]
            assert len(at_tcp) >= 3
            assert all(wants_keys(each.address) for each in at_tcp), "nor use or drain the engines"
            assert all(each.stats is not None for each in at_tcp), "their own user finds the keys"
            assert ask(client, COMPLETIONS, prompt=[5], max_tokens=1, data_parallel_rank=2)
            assert metric(client, "headrace:request_success_total", engine="2") > 0
            streams = [pool.submit(stream, server, each) for each in range(6)]
            wait_until(lambda: client.get("/load").json()["server_load"] == 6, 30, "all to run")
            engines = psutil.Process(other.pid).children()
            assert len(engines) == 2
            engines[1].kill()
            assert [each.result(60) for each in streams] == expected
            wait_until(lambda: ranks_up(client) == [0, 1, 2], 30, "the other host to start it again")
        wait_until(lambda: ranks_up(client) == [0], 30, "the engines of the other host to leave")
        assert ask(client, COMPLETIONS, prompt=[5], max_tokens=1)


@pytest.mark.system
@pytest.mark.parametrize("told", ["both hosts", "the engines' host"])
def test_a_host_without_http_drains_as_long_as_one_with_it(told: str) -> None:
    """Longer than the few seconds that engines get once the HTTP processes of their host have drained."""
    common = ("-dp", "2", "-dpa", "127.0.0.1", "-dpp", free_port())
    with (
        contextlib.closing(Server(*common, "-dpl", "0", null_model=SLOW)) as server,
        headless(*common, "-dpl", "2") as other,
        ThreadPoolExecutor(4) as pool,
        server.wait_ready().client() as client,
    ):
        wait_until(lambda: ranks_up(client) == [0, 1], 30, "the engines of the other host")
        body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
        asked = [pool.submit(ask, client, COMPLETIONS, **body, data_parallel_rank=each % 2) for each in range(4)]
        wait_until(lambda: metric(client, "headrace:num_requests_running") == 4, 30, "all to run")
        other.terminate()
        if told == "both hosts":
            server.signal()
        for each in asked:
            assert each.result(60)["usage"]["completion_tokens"] == 400
        assert other.wait(within(30)) == 0


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("-dp", "4", "-dpl", "2", "-dpr", "2", "-dph", "-dpa", "10.0.0.1"), [2, 3]),
        pytest.param(("-dp", "4", "-dpn", "2"), [2], marks=pytest.mark.system),
        (("-dp", "4", "-dpn", "0", "-dpe"), [0]),
    ],
    ids=["hybrid", "external", "external by its flag"],
)
def test_a_host_serves_for_its_own_engines_alone(arguments: tuple[str, ...], ranks: list[int]) -> None:
    with serving(*arguments, null_model={}) as server, server.client() as client:
        assert ranks_up(client) == ranks
        answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "data_parallel_rank": ranks[-1]})
        assert answer.status_code == 200, answer.text
        refused = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "data_parallel_rank": 1})
        assert refused.status_code == 400
        assert f"of rank {', '.join(map(str, ranks))}" in refused.json()["error"]["message"]
        if "-dpa" in arguments:
            server.wait_log("data_parallel_address is not needed")


def ranks(engine: dict[str, Any], **server: Any) -> Ranks:
    return ranks_of(parse_options(model="null", **engine), ServeOptions(**server))


def test_which_ranks_are_here_follows_from_the_options() -> None:
    assert ranks({}) == Ranks(range(1))
    assert ranks({"data_parallel_size": 4}) == Ranks(range(4))
    at = "tcp://127.0.0.1:29550"
    assert ranks({"data_parallel_size": 4, "data_parallel_size_local": 0}) == Ranks(range(0), at, has_coordinator=True)
    there = ranks({"data_parallel_size": 4, "data_parallel_size_local": 2}, headless=True, data_parallel_start_rank=2)
    assert there == Ranks(range(2, 4), at)
    assert there.new_address() == "tcp://127.0.0.1:*"
    assert ranks({}, data_parallel_address="::1", headless=True).coordinator == "tcp://[::1]:29550"


def test_a_port_of_the_coordinator_that_is_taken_is_told_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [*null_engine_arguments(), "-dp", "2", "-dpl", "1", "-dpp", port, "--port", "0"]
        assert main(["serve", *arguments]) == 1
    said = capsys.readouterr().err
    assert f"cannot listen at tcp://127.0.0.1:{port}: address already in use\n" in said
    assert "--data-parallel-rpc-port" in said


@pytest.mark.parametrize(
    ("engine", "server", "words"),
    [
        ({"data_parallel_size": 2}, {"data_parallel_start_rank": 1}, "ranks 1 to 2 .*_size=2 has ranks 0 to 1"),
        (
            {},
            {"data_parallel_start_rank": 1},
            "rank 1 would be started here, and data_parallel_size=1 has rank 0 alone",
        ),
        ({"data_parallel_size": 2}, {"data_parallel_hybrid_lb": True, "headless": True}, "choose one"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 2},
            {"data_parallel_external_lb": True},
            "single engine",
        ),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, {}, "_local=3 is more than data_parallel_size=2"),
        ({"data_parallel_size": 2}, {"data_parallel_external_lb": True, "headless": True}, "excludes hybrid and headl"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, {"headless": True}, "size_local is 0"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, {"data_parallel_hybrid_lb": True}, "of this host"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, {"headless": True}, "ray places engines"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, {"headless": True}, "experts"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, {"headless": True}, "engine-core"),
    ],
)
def test_what_contradicts_is_refused(engine: dict[str, Any], server: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ranks(engine, **server)


@pytest.mark.parametrize(
    "given",
    [
        {"port": 8080},
        {"max_migrations": 1, "api_key": (Secret("secret"),)},
        {"api_server_count": 2, "tool_call_parser": "hermes", "metrics_prefix": "vllm"},
    ],
)
def test_a_host_without_http_refuses_options_of_http_by_their_names(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"headless serves no HTTP: leave {', '.join(given)} out") as refusal:
        check_serve_options(ServeOptions(headless=True, **given))
    check_serve_options(ServeOptions(headless=False, **given))
    assert "data_parallel" not in str(refusal.value)


def test_a_host_without_http_takes_options_of_its_engines() -> None:
    check_serve_options(
        ServeOptions(headless=True, data_parallel_address="::1", restart_engine=3, keys="k", log_level="debug")
    )


def test_what_starts_all_engines_refuses_to_start_some() -> None:
    with pytest.raises(OptionError, match="data_parallel_size_local=1: all of data_parallel_size"):
        start_ranks(parse_options(model="null", data_parallel_size=2, data_parallel_size_local=1))
