"""vLLM's development routes: they reach every engine, and are there only where they were asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import schemathesis
from http_server import Server, metric, serving
from hypothesis import HealthCheck, Phase, given, settings
from patience import wait_until
from served_routes import DEVELOPMENT_ROUTES, ROUTES, document_of
from test_http_lifecycle import COMPLETIONS, ENDLESS, SLOW, streaming
from thinned import every

ASKED = {"prompt": [5], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of two processes: what one is told holds in the other."""
    folder = tmp_path_factory.mktemp("profiles")
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)})
    options = ("--server-dev-mode", "--enable-sleep-mode", "--api-server-count", "2", "--progress-timeout", "0.2")
    with serving(*options, "--profiler-config", profiler, null_model=SLOW) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        assert client.post("/wake_up").status_code == 200
        assert client.post("/resume").status_code == 200


def are_paused(server: Server) -> set[bool]:
    """As told by several connections, which the kernel deals out to the processes."""
    answers = set()
    for _ in range(8):
        with server.client() as client:
            answers.add(client.get("/is_paused").json()["is_paused"])
    return answers


def test_a_pause_that_keeps_requests_lets_them_go_on_after_it(server, client):
    with streaming(client, max_tokens=40) as lines, server.client() as other:
        assert other.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert are_paused(server) == {True}
        tokens = metric(other, "headrace:generation_tokens_total")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, server.url + COMPLETIONS, json=ASKED, timeout=30)
            wait_until(lambda: metric(other, "headrace:num_requests_waiting") == 1, 30, "a request that waits")
            with pytest.raises(TimeoutError):
                waiting.result(0.5)  # longer than the progress timeout
            assert other.get("/health/progress").status_code == 200, "an engine that is paused is not frozen"
            assert metric(other, "headrace:generation_tokens_total") == tokens
            assert other.post("/resume").json() == {"status": "resumed"}
            assert waiting.result(30).status_code == 200
        assert are_paused(server) == {False}
        rest = [line for line in lines if line]
    assert '"finish_reason":"length"' in rest[-2]


def test_a_pause_aborts_requests_unless_it_is_told_otherwise(server, client):
    with streaming(client) as lines, server.client() as other:
        assert other.post("/pause").status_code == 200
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2]


@pytest.mark.parametrize("query", ["mode=wait", "wait_for_inflight_requests=true"])
def test_a_pause_may_wait_for_requests(server, client, query):
    with streaming(client, max_tokens=20) as lines, server.client() as other:
        assert other.post(f"/pause?{query}").status_code == 200
        assert metric(other, "headrace:num_requests_running") == 0
        rest = [line for line in lines if line]
    assert '"finish_reason":"length"' in rest[-2]


def sleep_states(client: httpx.Client) -> dict[str, float]:
    states = ("awake", "weights_offloaded", "discard_all")
    return {state: metric(client, "headrace:engine_sleep_state", sleep_state=state) for state in states}


def test_an_engine_sleeps_until_all_of_it_is_woken(server, client):
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/sleep?level=2&mode=keep").json() == {"status": "sleeping"}
    assert client.post("/sleep").json() == {"status": "sleeping"}, "it does already"
    for stream in (False, True):
        refused = client.post(COMPLETIONS, json={**ASKED, "stream": stream})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
        assert "wake_up" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    assert client.post("/wake_up?tags=weights").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert sleep_states(client) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
    assert client.post("/wake_up?tags=weights&tags=kv_cache").json() == {"status": "awake"}
    assert sleep_states(client) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert client.post(COMPLETIONS, json=ASKED).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/wake_up?tags=dreams").status_code == client.post("/sleep?level=3").status_code == 400
    assert client.post("/sleep?level=1").status_code == 200
    assert sleep_states(client) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    assert client.post("/wake_up").json() == {"status": "awake"}


def test_the_prefix_cache_is_forgotten(server, client):
    body = {"prompt": [7] * 64, "max_tokens": 1}

    def num_cached() -> int:
        return int(client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() == 48
    assert client.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
    assert client.post("/reset_mm_cache").json() == {"status": "ok"}
    assert client.post("/reset_mm_cache?everything=1").status_code == 400
    assert num_cached() == 0


def test_weights_are_read_again_and_a_wrong_query_is_named(server, client):
    def num_cached() -> int:
        body = {"prompt": [9] * 64, "max_tokens": 1}
        return int(client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() == 48
    assert client.post("/reload_weights?weights_path=/elsewhere").json() == {"status": "ok"}
    assert num_cached() == 0, "what the old weights had computed is of no use"
    refused = client.post("/reload_weights?path=/elsewhere")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
    refused = client.post("/reload_weights", json={"weights_path": "/elsewhere"})
    assert refused.status_code == 400
    assert "reads no body, its parameters stand in the query: weights_path" in refused.json()["error"]["message"]
    assert client.post("/reload_weights", json={}).status_code == 200


def test_a_profile_is_written(server, client):
    assert client.post("/start_profile").status_code == 200
    client.post(COMPLETIONS, json=ASKED)
    (file,) = client.post("/stop_profile").json()["files"]
    assert "traceEvents" in json.loads(Path(file).read_text())
    refused = client.post("/stop_profile")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "command_refused"


def test_what_an_engine_is(server, client):
    (engine,) = client.get("/server_info").json()["engines"]
    assert engine["options"]["model"] == "null"
    assert all(each.keys() == {"value", "reason"} for each in engine["decisions"].values())
    assert engine["decisions"]["max_num_seqs"]["value"]
    assert engine["facts"]["num_blocks"] > 0
    assert client.get("/get_world_size").json() == {"world_size": 1}


def test_wrong_parameters_are_named(server, client):
    for query, param in (("mode=nap", "mode"), ("clear_cache=perhaps", "clear_cache"), ("mood=keep", "mood")):
        refused = client.post(f"/pause?{query}")
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param


def test_a_page_of_another_site_cannot_stop_the_engine(server, client):
    for path in ("/pause", "/reset_prefix_cache", "/reset_mm_cache", "/reload_weights", "/start_profile"):
        assert client.post(path, headers={"origin": "https://evil.example"}).status_code == 403
    assert are_paused(server) == {False}


def test_without_the_option_none_of_them_is_there():
    with serving() as server, server.client() as client:
        for route in DEVELOPMENT_ROUTES:
            assert client.request(route.method, route.path).status_code == 404
        assert client.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 1}).status_code == 200


OPERATIONS = [
    result.ok()
    for result in schemathesis.openapi.from_dict(
        json.loads(document_of(*ROUTES, *DEVELOPMENT_ROUTES))
    ).get_all_operations()
]


@pytest.mark.parametrize(
    "operation",
    every(6, [each for each in OPERATIONS if each.path in {route.path for route in DEVELOPMENT_ROUTES}]),
    ids=lambda each: each.label,
)
def test_no_input_makes_the_server_fail(server, client, operation):
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        assert case.call(base_url=server.url, timeout=30).status_code < 500

    check()
