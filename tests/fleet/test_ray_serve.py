"""docs/deploy/ray_serve.py: a replica passes streams on as they come, and they outlive an engine. Without Ray, too."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
import yaml
from http_server import events_of, metric
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from patience import wait_until, within
from starlette.requests import Request

from headrace.core.options.parsing import OptionParser, options_from_arguments, struct_from_arguments
from headrace.frontend.cli.commands import serve as serve_command
from headrace.frontend.http.options import ServeOptions, check_serve_options

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
SUPPORT = Path(__file__).parents[1] / "support"
NUM_TOKENS = 300
COMPLETIONS = "/v1/completions"
ARGUMENTS = {
    "model": "null",
    "distributed_executor_backend": BACKEND,
    "hf-overrides": json.dumps({"vocab_size": VOCAB_SIZE, "step_delay_s": 0.02}),
    "api_key": "secret",
}


def load_file() -> Any:
    """The application's module, without Ray."""
    spec = importlib.util.spec_from_file_location("ray_serve", DEPLOY / "ray_serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer secret"})


def asked(number: int) -> dict[str, Any]:
    return {"prompt": [5, number], "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number, "stream": True,
            "logprobs": 0, "return_tokens_as_token_ids": True}  # fmt: skip


def stream(url: str, number: int, rank: int | None = None) -> list[str]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    with client_of(url) as client, client.stream("POST", COMPLETIONS, json=asked(number), headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        choices = (choice for event in events_of(response) for choice in event["choices"])
        return [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]


def check_passing_on(url: str) -> None:
    """What a client sees is what the server behind says, and that hears when the client leaves."""
    with client_of(url) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["null"]
        refused = httpx.post(f"{url}{COMPLETIONS}", json=asked(0), timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        missing = client.get("/v1/no such%2Fpath?a=b&c=%20")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert "no such" in missing.json()["error"]["message"]
        with client.stream("POST", COMPLETIONS, json={**asked(0), "max_tokens": 30_000}) as response:
            assert response.status_code == 200
            next(response.iter_raw())
        wait_until(
            lambda: metric(client, "headrace:request_success_total", finished_reason="abort") == 1,
            20,
            "the end of what nobody reads",
        )


class Running:
    """A replica behind an HTTP server in a loop of this thread's, as Ray Serve has one."""

    def __init__(self, module: Any, arguments: dict[str, str]) -> None:
        self._module, self._arguments = module, arguments

    async def __aenter__(self) -> Running:
        self.replica = self._module.Replica.__new__(self._module.Replica)
        await self.replica.__init__(self._arguments)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await self.replica(Request({**scope, "root_path": "/llm"}, receive))
            await response(scope, receive, send)

        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/llm"
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving
        self._socket.close()
        await self.replica.close()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.mark.usefixtures("without_ray")
def test_a_replica_passes_on_all_that_its_server_says_and_is_ill_when_that_is_gone() -> None:
    async def run() -> None:
        async with Running(load_file(), ARGUMENTS) as running:
            replica = running.replica
            await asyncio.to_thread(check_passing_on, running.url)
            first, again = await asyncio.gather(*(asyncio.to_thread(stream, running.url, 3) for _ in range(2)))
            assert first == again
            assert len(first) == NUM_TOKENS
            await replica.check_health()
            server = psutil.Process(replica._child.pid)
            engines = server.children(recursive=True)
            assert engines
            replica._child.kill()
            with pytest.raises(RuntimeError, match="does not answer"):
                await replica.check_health()
            failed = await asyncio.to_thread(httpx.get, f"{running.url}/health", timeout=30)
            assert (failed.status_code, "does not answer" in failed.text) == (503, True)
        psutil.wait_procs(engines, 60)
        assert not any(each.is_running() for each in engines)

    asyncio.run(run())


@pytest.mark.usefixtures("without_ray")
def test_a_replica_whose_server_does_not_start_says_so() -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"headrace serve ended with status [1-9]"):
            async with Running(load_file(), {**ARGUMENTS, "max_num_seqs": "many"}):
                pass

    asyncio.run(run())


def parsed(line: Sequence[str]) -> Any:
    parser = OptionParser()
    serve_command.add_arguments(parser)
    arguments = parser.parse_args(list(line))
    check_serve_options(struct_from_arguments(arguments, ServeOptions))
    return options_from_arguments(arguments)


def test_arguments_are_options_of_ours_and_ray_places_several_engines() -> None:
    module = load_file()
    (application,) = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text())["applications"]
    name, _, function = application["import_path"].partition(":")
    assert (DEPLOY / f"{name}.py").is_file()
    assert callable(getattr(module, function))
    for arguments, backend in (
        (application["args"], "ray"),
        ({"model": "m"}, "mp"),
        ({"model": "m", "data-parallel-size": "2", "data-parallel-backend": "mp"}, "mp"),
        ({"coordinator": "tcp://10.0.0.1:5560", "data_parallel_size": 2}, "mp"),
    ):
        line = module.command(module.options_of(arguments), Path("/tmp/http.sock"))
        options = parsed(line[line.index("serve") + 1 :])
        assert options.data_parallel_backend == backend
        assert options.model == arguments.get("model", options.model)
        assert options.data_parallel_size == int(arguments.get("data_parallel_size", options.data_parallel_size))


@pytest.fixture
def others() -> list[psutil.Process]:
    """Below this process before the application is there: engines that other tests keep."""
    return psutil.Process().children(recursive=True)


@pytest.fixture
def ray_url(others: list[psutil.Process]) -> Iterator[str]:
    """Of an application with two engines that Ray placed."""
    serve = pytest.importorskip("ray.serve", reason="the extra ray brings it", exc_type=ImportError)
    import ray

    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        patch.setenv("PYTHONPATH", f"{DEPLOY}:{SUPPORT}")  # of replicas and engines
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Serve ends a proxy that is not there after three times 5 s, which on a busy machine none is.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")
        patch.syspath_prepend(DEPLOY)
        port = free.getsockname()[1]
        free.close()
        import ray_serve

        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            arguments = {**ARGUMENTS, "data-parallel-size": "2"}
            serve.run(ray_serve.application(arguments), name="headrace", route_prefix="/llm")
            yield f"http://127.0.0.1:{port}/llm"
        finally:
            serve.shutdown()
            ray.shutdown()


def below(program: str, others: list[psutil.Process]) -> list[psutil.Process]:
    """Processes below this one but those others that have this among their arguments."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if each not in others and program in each.cmdline():
                found.append(each)
    return found


@pytest.mark.system
def test_no_stream_of_a_ray_serve_application_ends_with_its_engine(ray_url: str, others: list[psutil.Process]) -> None:
    check_passing_on(ray_url)
    with client_of(ray_url) as client, ThreadPoolExecutor(6) as pool:
        wait_until(lambda: metric(client, "headrace:engine_up") == 2, 120, "both engines, of which one was enough")
        expected = list(pool.map(lambda each: stream(ray_url, each), range(6)))
        assert {len(tokens) for tokens in expected} == {NUM_TOKENS}
        # The router may take one engine to be so much faster that it gets all: a busy machine makes them differ.
        streams = [pool.submit(stream, ray_url, each, each % 2) for each in range(6)]

        def running() -> list[float]:
            return [metric(client, "headrace:num_requests_running", engine=str(rank)) for rank in range(2)]

        # A busy machine may begin those of one engine long before the other's.
        wait_until(lambda: running() == [3, 3], 20, "streams from both engines at once")
        victims = below("headrace.core.process.daemon", others)
        assert len(victims) == 2
        victims[0].kill()
        assert [each.result(60) for each in streams] == expected
        assert metric(client, "headrace:router_migrations_total", reason="died") == 3
        (server,) = below(ray_serve_program(), others)
        left = [server, *server.children(recursive=True), *below("headrace.core.process.daemon", others)]
        server.parent().kill()  # the replica; Ray Serve starts another one
        assert not psutil.wait_procs(left, within(30))[1]

        def is_back() -> bool:
            return client.get("/health/ready").status_code == 200

        wait_until(is_back, 120, "another replica")
        assert stream(ray_url, 3) == expected[3]


def ray_serve_program() -> str:
    program: str = load_file().PROGRAM
    return program
