"""The OpenAPI document, held against the server by schemathesis; and what /metrics says."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import schemathesis
from http_server import Server, serving, stream
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from served_routes import ROUTES, document_of
from server_here import serving_here
from thinned import every

from headrace.core.options.option import Secret
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.frontend.http.server.hidden_metrics import HIDDEN, hidden_names
from headrace.ipc.failure import OptionError

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--metrics-prefix", "vllm", "--show-hidden-metrics-for-version", "0.10", "--max-model-len", "512")
    with serving(*options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


OPERATIONS = [
    result.ok() for result in schemathesis.openapi.from_dict(json.loads(document_of(*ROUTES))).get_all_operations()
]


@pytest.mark.parametrize("num_examples", [1, pytest.param(25, marks=pytest.mark.system)])
@pytest.mark.parametrize("operation", every(6, OPERATIONS), ids=lambda each: each.label)
def test_no_input_makes_the_server_fail(server, operation, num_examples):
    """Inputs that fit the document, and inputs that do not."""
    config = settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for mode in GenerationMode:

        @config
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            answer = case.call(base_url=server.url, timeout=30)
            assert answer.status_code < 500, answer.text

        with contextlib.suppress(Unsatisfiable):  # an operation without input cannot be given a wrong one
            check()


def test_the_document_names_every_field_and_says_what_is_refused(client):
    api = client.get("/openapi.json").json()
    assert api["openapi"].startswith("3.1")
    properties = api["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["temperature"]["description"]
    assert "enum" not in properties["store"]
    assert properties["suffix"]["enum"] == [None, ""]


def test_metrics_have_vllms_names_and_count_and_no_panel_of_its_dashboards_is_empty(client):
    stream(client, COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 6})
    text = client.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        'num_requests_waiting_by_reason{engine="0",model_name="null",reason="capacity"}',
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "gc_pause_seconds_bucket",
        "tokens_after_disconnect_total",
        # What the panels of vLLM's own Grafana dashboards ask for besides, of this version and of earlier ones.
        "time_per_output_token_seconds_bucket",
        "gpu_cache_usage_perc",
        "request_max_num_generation_tokens_sum",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "iteration_tokens_total_bucket",
        "prompt_tokens_cached_total",
        'engine_sleep_state{engine="0",model_name="null",sleep_state="awake"}',
    ):
        assert re.search(rf"^vllm:{name}[ {{]", text, re.MULTILINE), name
    for former, (now, _) in HIDDEN.items():
        pairs = [re.findall(rf"^vllm:{name}(_\w+)?(\{{.*) \S+$", text, re.MULTILINE) for name in (former, now)]
        assert pairs[0] == pairs[1] != [], former
    info = re.search(r"^vllm:cache_config_info\{(.*)\} 1", text, re.MULTILINE)
    assert info is not None
    shape = dict(re.findall(r'(\w+)="([^"]*)"', info[1]))
    assert int(shape["kv_cache_size_tokens"]) == (int(shape["num_gpu_blocks"]) - 1) * int(shape["block_size"])
    assert float(shape["kv_cache_max_concurrency"]) == int(shape["kv_cache_size_tokens"]) / 512
    handler = r'\{handler="/v1/completions",method="POST"'
    assert re.search(rf'^http_requests_total{handler},status="2xx"\}} [1-9]', text, re.MULTILINE)
    assert re.search(rf"^http_request_duration_seconds_count{handler}\}} [1-9]", text, re.MULTILINE)


def test_steps_are_counted_by_their_tokens():
    with serving() as server, server.client() as client:
        stream(client, COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True})
        text = client.get("/metrics").text
    (total,) = re.findall(r"headrace:iteration_tokens_total_sum\{.*\} (\S+)", text)
    assert float(total) == 3 + 5, "the last token is computed by no step"
    (steps,) = re.findall(r"headrace:iteration_tokens_total_count\{.*\} (\S+)", text)
    assert 6 <= float(steps) <= 7
    assert not [name for name in HIDDEN if f"headrace:{name}" in text], "former names are there on request only"


@pytest.mark.parametrize(
    ("version", "num_shown"),
    [(None, 0), ("0.9", 4), ("0.10", 4), ("v0.10.2", 4), ("0.11", 1), ("0.11.0rc1", 1), ("0.12", 0), ("1.0", 0)],
)
def test_former_names_are_those_that_a_version_of_vllm_had(version: str | None, num_shown: int) -> None:
    assert len(hidden_names(version)) == num_shown


@pytest.mark.parametrize("version", ["", "10", "latest", "0.x", "0.10 ", "-0.10", "0.10/"])
def test_a_text_that_is_no_version_is_refused_before_the_server_starts(version: str) -> None:
    with pytest.raises(OptionError, match=r"show_hidden_metrics_for_version=.*such as 0\.10"):
        check_serve_options(msgspec.structs.replace(ServeOptions(), show_hidden_metrics_for_version=version))


def test_histograms_are_cumulative_and_count_what_happened():
    with serving() as server, server.client() as client:
        for _ in range(3):
            stream(client, COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True})
        text = client.get("/metrics").text
    buckets = [float(n) for n in re.findall(r"headrace:inter_token_latency_seconds_bucket\{.*\} (\S+)", text)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 3 * 5
    assert re.search(r'request_success_total\{.*finished_reason="length".*\} 3.0', text)
    assert re.search(r"headrace:generation_tokens_total\{.*\} 18.0", text)
    assert re.search(r"headrace:request_prompt_tokens_sum\{.*\} 9.0", text)


def test_each_route_has_its_own_counts_once_it_has_been_called() -> None:
    with serving_here(ServeOptions(port=0, api_key=(Secret("k"),))) as server, server.client() as client:
        client.headers["authorization"] = "Bearer k"
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert client.post("/v1/messages", json={"model": "null", **body}).status_code == 200
        assert client.get("/v1/models/null").status_code == 200
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/v1/models/null", headers={"authorization": ""}).status_code == 401
        assert client.post("/v1/completions/", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert client.get("/v1/completions").status_code == 405
        assert client.get("/nothing/here").status_code == 404
        text = client.get("/metrics").text
    counted = {
        (path, method, status): int(float(count))
        for path, method, status, count in re.findall(
            r'^http_requests_total\{handler="(.*)",method="(.*)",status="(.*)"\} (\S+)$', text, re.MULTILINE
        )
    }
    assert {key: count for key, count in counted.items() if count} == {
        ("/v1/messages", "POST", "2xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 2,
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("none", "", "4xx"): 1,
    }
