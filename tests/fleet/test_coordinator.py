"""Coordinators as programs: engines announce themselves, frontends find them, and nobody misses one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import http_server
import psutil
import pytest
from http_server import Server, ask, metric, null_engine_arguments, serving
from patience import wait_until
from test_serve_fleet import busy_engine, engines_of, stream, undisturbed

from headrace import LLM, SamplingParams
from headrace.frontend.cli.main import main
from headrace.frontend.client.engine_watch import engine_addresses, look_at
from headrace.ipc.failure import EngineDeadError, OptionError

SLOW = {"step_delay_s": 0.02}
COMPLETIONS = "/v1/completions"


@contextmanager
def program(*command: str, ready: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program that prints its address when it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(Path(http_server.__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert ready in line, (line, process.stderr.read() if process.stderr is not None else "")
        yield process, line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def coordinator(address: str) -> Any:
    return program("-m", "headrace", "coordinator", "--address", address, ready="coordinator: ready at")


def engine(coordinator_address: str, rank: int, *more: str) -> Any:
    known = ("--coordinator", coordinator_address, "-dp", "8", "-dpn", str(rank), *more)
    arguments = [*null_engine_arguments(**SLOW), *known]
    return program("-m", "headrace.core.process.daemon", *arguments, ready="engine-core: ready at")


def coordinators_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in children if "headrace.core.coordinator.program" in each.cmdline()]


@pytest.mark.system
def test_several_http_processes_share_several_engines() -> None:
    with serving("-dp", "2", "--api-server-count", "2", null_model=SLOW) as server, ThreadPoolExecutor(6) as pool:
        expected = undisturbed()
        (told,) = coordinators_of(server)
        streams = [pool.submit(stream, server, each) for each in range(6)]
        with server.client() as client:
            wait_until(lambda: client.get("/load").json()["server_load"] == 6, 30, "all to run")
            seen = asyncio.run(look_at(engine_addresses()))  # what `headrace ps` lists
            assert {each.pid for each in engines_of(server)} <= {each.pid for each in seen}
            victim = busy_engine(server, client)
            told.kill()
            victim.kill()
            assert [each.result(60) for each in streams] == expected
            wait_until(lambda: len(engines_of(server)) == 2, 20, "the engine that takes its place")
            wait_until(lambda: metric(client, "headrace:engine_up") == 2, 30, "its return")
            assert metric(client, "headrace:router_migrations_total", reason="died") > 0
            for rank in range(2):  # which it is known by again
                assert ask(client, COMPLETIONS, prompt=[5], max_tokens=1, data_parallel_rank=rank)
        server.wait_log("the coordinator has ended and is started again")
        assert len(coordinators_of(server)) == 1


@pytest.mark.system
def test_frontends_find_engines_and_go_on_without_a_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"ipc://{tmp_path}/c.sock"
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    with contextlib.ExitStack() as stack:
        process, _ = stack.enter_context(coordinator(address))
        stack.enter_context(engine(address, 0))
        second, _ = stack.enter_context(engine(address, 1))

        def shown() -> str:
            assert main(["top", "--coordinator", address, "--once", "--interval", "0.1"]) == 0
            return capsys.readouterr().out

        wait_until(lambda: shown().count("ipc://") == 2, 20, "both to be listed")
        assert "null" in shown()
        with LLM(coordinator=(address,)) as llm:
            pool = llm._client
            wait_until(lambda: sum(each.usable for each in pool.engines) == 2, 20, "both to be found")
            assert [each.index for each in pool.engines] == [0, 1]
            expected = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids
            process.kill()
            process.wait()
            assert llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
            with coordinator(address), engine(address, 2):
                wait_until(lambda: sum(each.usable for each in pool.engines) == 3, 30, "the third to be found")
                second.send_signal(signal.SIGTERM)
                wait_until(lambda: [each.index for each in pool.engines] == [0, 2], 30, "the second to be let go")
                assert llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.system
def test_with_keys_engines_are_found_over_tcp_by_those_who_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "ours.keys", tmp_path / "others.keys"]
    for each in files:
        assert main(["keys", str(each)]) == 0
    monkeypatch.setenv("HEADRACE_KEYS", str(files[0]))
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(coordinator("tcp://127.0.0.1:*"))
        stack.enter_context(engine(address, 0, "--address", "tcp://127.0.0.1:*"))
        stack.enter_context(engine(address, 1, "--address", "tcp://127.0.0.1:*", "--keys", str(files[1])))
        with LLM(coordinator=(address,)) as llm:
            (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3
            pool = llm._client
            assert [each.index for each in pool.engines] == [0], "the other has keys that the coordinator does not know"
        monkeypatch.setenv("HEADRACE_KEYS", str(files[1]))
        with pytest.raises(EngineDeadError, match="no engine was found"):
            LLM(coordinator=(address,))


@pytest.mark.system
def test_a_server_of_found_engines_serves_and_tells_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/c.sock"
    found = serving("--coordinator", address, attached=True)
    with coordinator(address), engine(address, 0), found as server, server.client() as client:
        assert ask(client, COMPLETIONS, prompt=[5, 6], max_tokens=2)["usage"]["completion_tokens"] == 2
    with pytest.raises(OptionError, match="leave out model, dtype"):
        LLM("null", coordinator=(address,), dtype="float32")
    monkeypatch.setattr("headrace.frontend.api.llm.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(EngineDeadError, match=r"no engine was found within 0\.5 s by the coordinator"):
        LLM(coordinator=(address,))
