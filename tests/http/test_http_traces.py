"""Traces of requests, as a collector of OpenTelemetry in this process gets them by OTLP over HTTP."""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from http_server import ask, stream
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_here import serving_here

from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.tracing.tracer import PROTOCOL_VARIABLE, Tracer
from headrace.ipc.failure import OptionError

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
CHAT = "/v1/chat/completions"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps the spans that it is sent. Those of a server are complete once it has ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> Any:
        (span,) = [each for each in self.spans if each.name == name]
        return span

    def below(self, parent: Any) -> dict[str, Any]:
        return {each.name: each for each in self.spans if each.parent_span_id == parent.span_id}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def traced(collector: Collector) -> Iterator[httpx.Client]:
    with serving_here(ServeOptions(port=0, otlp_traces_endpoint=collector.url)) as server, server.client() as client:
        yield client


def attributes(span: Any) -> dict[str, Any]:
    """Of a span or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_streamed_chat_has_the_spans_of_its_parts_below_its_callers(collector: Collector) -> None:
    with traced(collector) as client:
        client.headers["traceparent"] = f"00-{TRACE}-{CALLER}-01"
        client.headers["tracestate"] = "vendor=1"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0.5, "top_p": 0.9}
        events = stream(client, CHAT, {**body, "stream_options": {"include_usage": True}})
    root = collector.named("llm_request")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, CALLER, "vendor=1")
    assert root.kind == root.SPAN_KIND_SERVER
    assert collector.services == {"headrace"}
    parts = collector.below(root)
    assert list(parts) == ["tokenize", "queue", "prefill", "decode"]
    assert all(each.trace_id == root.trace_id for each in parts.values())
    in_turn = sorted(parts.values(), key=lambda each: each.start_time_unix_nano)
    assert [each.name for each in in_turn] == list(parts)
    for before, after in itertools.pairwise(in_turn[1:]):
        assert before.end_time_unix_nano == after.start_time_unix_nano, "the core's parts follow each other"
    assert root.start_time_unix_nano <= in_turn[0].start_time_unix_nano
    assert in_turn[-1].end_time_unix_nano <= root.end_time_unix_nano + 1_000_000_000
    told, usage = attributes(root), events[-1]["usage"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 20
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.n"]) == (20, 1)
    assert told["gen_ai.request.id"] in events[0]["id"]
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    inference = told["gen_ai.latency.time_in_model_prefill"] + told["gen_ai.latency.time_in_model_decode"]
    assert told["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference)


def test_a_grammar_that_is_compiled_first_is_a_part_of_its_own(collector: Collector) -> None:
    with traced(collector) as client:
        ask(
            client,
            CHAT,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=8,
            structured_outputs={"choice": ["a"]},
        )
    root = collector.named("llm_request")
    assert root.parent_span_id == b"", "nobody called"
    assert list(collector.below(root)) == ["tokenize", "grammar", "queue", "prefill", "decode"]


def test_each_prompt_and_a_request_that_is_refused(collector: Collector) -> None:
    with traced(collector) as client:
        ask(client, "/v1/completions", prompt=["one", "two"], max_tokens=2)
        assert client.post("/v1/completions", json={"prompt": "x", "temperature": -1}).status_code == 400
        assert client.get("/v1/models", headers={"traceparent": "nonsense"}).status_code == 200
    roots = [each for each in collector.spans if each.name == "llm_request"]
    assert len(roots) == 2
    assert len({each.trace_id for each in roots}) == 2


def test_a_caller_that_samples_nothing_gets_nothing(collector: Collector) -> None:
    with traced(collector) as client:
        client.headers["traceparent"] = f"00-{TRACE}-{CALLER}-00"
        ask(client, "/v1/completions", prompt="x", max_tokens=2)
    assert collector.spans == []


def test_a_collector_that_is_away_costs_a_request_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    gone = Collector("http://127.0.0.1:9/v1/traces")
    with traced(gone) as client:
        assert ask(client, "/v1/completions", prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "carrier-pigeon")
    with pytest.raises(OptionError, match="allowed: grpc, http/protobuf"):
        Tracer("http://127.0.0.1:9")
