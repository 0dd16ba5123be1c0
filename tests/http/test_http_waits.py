"""A server that is started before the engines that it is to use waits for them, not ready, and says for which."""

from __future__ import annotations

import contextlib
import re

import httpx
import pytest
from http_server import HERE, Server
from patience import wait_until
from test_behind_nginx import free_port
from test_http_lifecycle import COMPLETIONS
from test_http_restart import NULL_ENGINE, engine_at

from headrace.core.options.parsing import parse_options
from headrace.core.process.child import start_coordinator, start_engine
from headrace.frontend.api.llm import connect
from headrace.ipc.failure import EngineDeadError


@pytest.mark.parametrize(
    ("engines", "processes"),
    [
        pytest.param(["ipc"], "2", marks=pytest.mark.system),
        pytest.param(["absent", "tcp"], "1", marks=pytest.mark.system),
        (["coordinator"], "2"),
        pytest.param(["ipc"], "1", marks=pytest.mark.system),
        (["ipc", "absent"], "1"),
    ],
)
def test_a_server_waits_for_its_engine_and_says_for_which(engines, processes, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    addresses = {
        "ipc": f"ipc://{tmp_path}/engine.sock",
        "absent": f"ipc://{tmp_path}/absent/engine.sock",
        "tcp": f"tcp://127.0.0.1:{free_port()}",
        "coordinator": f"ipc://{tmp_path}/coordinator.sock",
    }
    option = "--coordinator" if engines == ["coordinator"] else "--engine"
    named = [each for kind in engines for each in (option, addresses[kind])]
    server = Server(*named, "--port", str(port := free_port()), "--api-server-count", processes, attached=True)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for kind in engines:
            server.wait_log(rf"waiting for an engine: .*{re.escape(addresses[kind])}")
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))
        statuses = {path: client.get(path).status_code for path in ("/health", "/health/ready", "/health/live")}
        assert statuses == {"/health": 503, "/health/ready": 503, "/health/live": 200}
        assert "://" not in client.get("/health").text, "addresses are for the log"
        asked = client.post(COMPLETIONS, json={"prompt": [5]}).json()["error"]
        assert (asked["code"], "waiting for" in asked["message"]) == ("loading", True)
        if engines == ["coordinator"]:
            coordinator = start_coordinator(addresses["coordinator"])
            stack.callback(coordinator.kill)
            coordinator.wait_ready(60)
            told = parse_options(**NULL_ENGINE, coordinator=[addresses["coordinator"]])
            engine = start_engine(told, f"ipc://{tmp_path}/told.sock")
            stack.callback(engine.kill)
        else:
            there = next(kind for kind in engines if kind != "absent")
            stack.enter_context(engine_at(addresses[there]))
        server.wait_ready()
        assert client.get("/health/ready").status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1}).status_code == 200
        server.signal()
        assert server.wait_exit() == 0


def test_a_server_that_waits_ends_when_it_is_asked_to(tmp_path):
    server = Server("--engine", f"ipc://{tmp_path}/engine.sock", "--api-server-count", "2", attached=True)
    try:
        server.wait_log("waiting for an engine")
        server.signal()
        assert server.wait_exit() == 0
    finally:
        server.close()


def test_a_program_waits_for_an_engine_as_long_as_it_says(tmp_path):
    with pytest.raises(EngineDeadError, match=r"no engine-core listens at|within 0.5 s"):
        connect(f"ipc://{tmp_path}/engine.sock", timeout_s=0.5)


def test_an_engine_of_another_kind_is_not_waited_for(tmp_path):
    coordinator = start_coordinator(f"ipc://{tmp_path}/coordinator.sock")
    try:
        coordinator.wait_ready(60)
        server = Server("--engine", f"ipc://{tmp_path}/coordinator.sock", attached=True)
        with contextlib.closing(server):
            wait_until(lambda: server.process.poll() is not None, 60, "its end")
            assert server.wait_exit() == 1
            assert "is no engine-core" in server.log
    finally:
        coordinator.kill()
