"""How a server listens and whom it answers: servers attached to the folder's one engine, asked by OpenAI's client."""

from __future__ import annotations

import concurrent.futures
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from http_server import Server, ask, serving, stream
from patience import wait_until
from thinned import every

KEY = "key-of-the-tests"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    command = [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", *files]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture(scope="module")
def guarded(address: str, certificate: Path) -> Iterator[Server]:
    """TLS, keys, a path that a proxy adds, and usage at the end of every stream."""
    arguments = ["--engine", address, "--api-key", KEY, "--root-path", "/llm", "--enable-force-include-usage"]
    arguments += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate.with_name("key.pem"))]
    with serving(*arguments, attached=True) as server:
        yield server


@pytest.fixture(scope="module")
def trusting(certificate: Path) -> Iterator[httpx.Client]:
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate)), timeout=30) as client:
        yield client


def sdk(url: str, http_client: Any, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=url, api_key=key, http_client=http_client, max_retries=0)


# tests/entrypoints/openai/chat_completion/test_root_path.py
def test_behind_a_root_path_the_key_counts_with_it_and_without(guarded: Server, trusting: httpx.Client) -> None:
    bare = guarded.url.removesuffix("/llm")
    assert guarded.url.startswith("https://")
    assert guarded.url != bare
    for url in (f"{bare}/v1", f"{guarded.url}/v1"):
        with pytest.raises(openai.AuthenticationError):
            sdk(url, trusting, "wrong").chat.completions.create(model="tiny", messages=USER)
        answer = sdk(url, trusting).chat.completions.create(model="tiny", messages=USER, **GREEDY)
        assert answer.choices[0].message.role == "assistant"


# tests/entrypoints/serve/middleware/test_optional_middleware.py: only what generates is guarded
def test_metrics_and_version_are_open_beside_keys_and_closed_by_option(
    guarded: Server, trusting: httpx.Client, address: str
) -> None:
    open_paths, closed_paths = ("/health", "/ping", "/metrics", "/version"), ("/v1/models", "/load", "/docs")
    for path in open_paths:
        assert trusting.get(guarded.url + path).status_code == 200, path
    for path in closed_paths:
        assert trusting.get(guarded.url + path).status_code == 401, path
    assert KEY not in trusting.get(guarded.url + "/metrics").text
    document = trusting.get(guarded.url + "/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    assert "security" not in document["paths"]["/metrics"]["get"]
    closing = ("--engine", address, "--api-key", KEY, "--guard-metrics")
    with serving(*closing, attached=True) as server, server.client() as client:
        assert [client.get(path).status_code for path in open_paths] == [200, 200, 401, 401]
        allowed = {"authorization": f"Bearer {KEY}"}
        assert [client.get(path, headers=allowed).status_code for path in open_paths] == [200] * 4


# tests/entrypoints/serve/instrumentator/test_basic.py::test_server_load, test_metrics.py (--show-hidden-metrics...)
def test_flags_for_what_is_always_there_pass() -> None:
    flags = ["--enable-server-load-tracking", "--show-hidden-metrics-for-version", "0.9"]
    body = {"prompt": [5], "stream": True, "max_tokens": 1000, "ignore_eos": True}
    with serving(*flags, null_model={"step_delay_s": 0.01}) as server, server.client() as client:
        assert client.get("/load").json() == {"server_load": 0}
        with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()  # kept: to forget them is to hang up
            next(lines)
            assert client.get("/load").json() == {"server_load": 1}
        wait_until(lambda: client.get("/load").json() == {"server_load": 0}, 30, "the end of the request")
        assert "headrace:gpu_prefix_cache_hits_total" in client.get("/metrics").text
        assert "load-tracking" not in server.log, "it has what it asks for"


# tests/entrypoints/openai/chat_completion/test_enable_force_include_usage.py
def test_usage_is_in_every_event_and_at_the_end_whatever_a_stream_asks_for(
    guarded: Server, trusting: httpx.Client
) -> None:
    client = sdk(f"{guarded.url}/v1", trusting)
    for options in (None, {"include_usage": False}):
        more = {} if options is None else {"stream_options": options}
        *events, last = client.chat.completions.create(
            model="tiny",
            messages=USER,
            stream=True,
            **GREEDY,
            **more,
        )
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        counted = [event.usage.completion_tokens for event in events]
        assert counted == sorted(counted)
        assert all(event.choices for event in events)


# tests/entrypoints/openai: per-request metrics; a stream's are in the event with its usage
def test_times_of_a_request_are_in_its_answer_where_the_server_tells_them(address: str, client: httpx.Client) -> None:
    assert "metrics" not in ask(client, COMPLETIONS, prompt="a", **GREEDY)
    bodies = ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}))
    more = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with serving("--engine", address, "--enable-per-request-metrics", attached=True) as server, server.client() as own:
        for path, body in bodies:
            whole = ask(own, path, **body, **more)["metrics"]
            *events, last = stream(own, path, {**body, **more, "stream_options": {"include_usage": True}})
            assert not any("metrics" in each for each in events)
            for told in (whole, last["metrics"]):
                assert all(value is not None for value in told.values()), told
                whole_ms = told["time_to_first_token_ms"] + told["generation_time_ms"]
                assert told["generation_time_ms"] == pytest.approx(3 * told["mean_itl_ms"])
                assert told["tokens_per_second"] == pytest.approx(4000 / whole_ms)
            short = {**body, **more, "max_tokens": 1}
            assert ask(own, path, **short)["metrics"]["mean_itl_ms"] is None
            last = stream(own, path, {**short, "stream_options": {"include_usage": True}})[-1]
            assert last["metrics"].keys() == whole.keys() - {"mean_itl_ms"}
            assert None not in last["metrics"].values()
            assert "metrics" not in ask(own, path, **body, n=2, seed=1, max_tokens=2)


# tests/entrypoints/serve/instrumentator/test_uds.py
def test_a_unix_socket_answers_as_a_port_does(address: str, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    server = Server("--engine", address, "--uds", str(path), attached=True)
    try:
        server.wait_log("ready: ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://socket", timeout=30) as client:
            assert client.get("/health").status_code == 200
            answer = sdk("http://socket/v1", client).completions.create(model="tiny", prompt="a", **GREEDY)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
    finally:
        server.close()
    assert not path.exists()


@pytest.mark.system
# tests/entrypoints/launchers/api_server/test_multi_api_servers.py, test_shutdown.py::test_multi_api_server_shutdown
def test_several_processes_answer_alike_and_leave_none_behind(address: str) -> None:
    with serving("--engine", address, "--api-server-count", "2", attached=True) as server:
        with server.client() as client:

            def stream(number: int) -> str:
                body = {"prompt": "the water", "stream": True, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
                lines = client.post("/v1/completions", json=body).text.split("\n\n")
                events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
                return "".join(event["choices"][0]["text"] for event in events)

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                assert len(set(pool.map(stream, range(16)))) == 1
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        server.signal()
        assert server.wait_exit() == 0
    wait_until(lambda: not any(child.is_running() for child in children), 30, "the end of all processes")


@pytest.mark.system
# tests/entrypoints/launchers/test_shutdown.py: wait_timeout, abort_timeout, request_rejection
@pytest.mark.parametrize("timeout_s", every(2, ["30", "0"]))
def test_a_shutdown_waits_for_its_time_out_and_no_longer(timeout_s: str) -> None:
    with (
        serving("--shutdown-timeout", timeout_s, null_model={"step_delay_s": 0.01}) as server,
        server.client() as client,
    ):
        children = psutil.Process(server.process.pid).children(recursive=True)
        body = {"prompt": [5], "max_tokens": 80, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.signal()
            rest = [line for line in lines if line]
        assert ('"finish_reason":"length"' in rest[-2]) == (timeout_s == "30")
        assert rest[-1] == "data: [DONE]"
        assert server.wait_exit() == 0
    wait_until(lambda: not any(child.is_running() for child in children), 30, "the end of all processes")
