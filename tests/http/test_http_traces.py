"""Traces of requests, as a collector of OpenTelemetry in this process gets them by OTLP over HTTP."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from http_server import ask, stream
from null_with_tokenizer import BACKEND, PARROT, VOCAB_SIZE
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from server_here import serving_here
from test_http_tool_servers import TEMPLATE, call_of, tool_server
from test_http_tool_servers import ask as answered_with_tools

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.frontend.tracing.tracer import PROTOCOL_VARIABLE, Tracer
from headrace.ipc.failure import OptionError

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
CHAT = "/v1/chat/completions"
NULL: Any = {"distributed_executor_backend": BACKEND, "hf_overrides": {"vocab_size": VOCAB_SIZE}}
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
def traced(
    collector: Collector, details: str | None = None, serve: dict[str, Any] | None = None, **more: Any
) -> Iterator[httpx.Client]:
    """serve: options of the server; more: those of the engine."""
    traces: Any = {"otlp_traces_endpoint": collector.url, "collect_detailed_traces": details}
    with serving_here(ServeOptions(port=0, **traces, **(serve or {})), **more) as server, server.client() as client:
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


def test_a_server_that_carries_out_a_tool_continues_the_trace(collector: Collector) -> None:
    engine: Any = {"distributed_executor_backend": PARROT, "max_model_len": 4096}
    with (
        tool_server() as url,
        traced(collector, serve={"chat_template": TEMPLATE, "tool_server": (f"lab={url}",)}, **engine) as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", http_client=client) as official,
    ):
        client.headers["traceparent"] = f"00-{TRACE}-{CALLER}-01"
        items: list[Any] = [*answered_with_tools(official, call_of("trace")).output]
        broken: list[Any] = [*answered_with_tools(official, call_of("fail")).output]
    called, failed = (next(each for each in found if each.type == "mcp_call") for found in (items, broken))
    assert "Error executing tool fail" in str(failed.error)
    tool, failing = collector.named("execute_tool trace"), collector.named("execute_tool fail")
    assert called.output == f"{TRACE} {tool.span_id.hex()}"
    assert {tool.trace_id.hex(), failing.trace_id.hex()} == {TRACE}
    assert tool.kind == tool.SPAN_KIND_CLIENT
    assert attributes(tool) == {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "trace"}
    asked = [each for each in collector.spans if each.name == "llm_request"]
    assert tool.parent_span_id in [each.span_id for each in asked]
    assert len(asked) == 4, "each call was asked for by one and answered by another"


@pytest.mark.system
def test_a_collector_that_is_away_costs_a_request_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    gone = Collector("http://127.0.0.1:9/v1/traces")
    with traced(gone) as client:
        assert ask(client, "/v1/completions", prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("details", "names"),
    [("all", {"schedule", "execute", "forward"}), ("model", {"forward"}), ("worker, model", {"execute", "forward"})],
)
def test_detailed_traces_have_each_step_below_the_part_that_it_belongs_to(
    collector: Collector, details: str, names: set[str]
) -> None:
    num_tokens, prompt = 12, 200
    with traced(collector, details, null_model={"step_delay_s": 0.001}, max_num_batched_tokens=64) as client:
        client.headers["traceparent"] = f"00-{TRACE}-{CALLER}-01"
        body = {"messages": [{"role": "user", "content": "x" * prompt}], "max_tokens": num_tokens, "ignore_eos": True}
        events = stream(client, CHAT, {**body, "stream_options": {"include_usage": True}})
    root = collector.named("llm_request")
    parts = collector.below(root)
    assert list(parts) == ["tokenize", "queue", "prefill", "decode"]
    by_id = {each.span_id: each for each in collector.spans}
    steps = [each for each in collector.spans if each.name in ("schedule", "execute", "forward")]
    assert {each.name for each in steps} == names
    assert all(each.trace_id.hex() == TRACE for each in steps)
    outer = next(name for name in ("execute", "forward") if name in names)
    for part, fewest in (("prefill", events[-1]["usage"]["prompt_tokens"] / 64), ("decode", num_tokens - 1)):
        own = [each for each in steps if each.parent_span_id == parts[part].span_id]
        assert {each.name for each in own} == names - ({"forward"} if "execute" in names else set())
        assert len([each for each in own if each.name == outer]) >= fewest, part
        computed = sum(attributes(each)["headrace.step.num_tokens"] for each in own if each.name == outer)
        assert computed == (events[-1]["usage"]["prompt_tokens"] if part == "prefill" else num_tokens - 1)
    for each in steps:
        assert root.start_time_unix_nano <= each.start_time_unix_nano <= each.end_time_unix_nano
        above = by_id[each.parent_span_id]
        if each.name == "forward" and "execute" in names:
            assert above.name == "execute"
            assert above.start_time_unix_nano <= each.start_time_unix_nano
            assert each.end_time_unix_nano <= above.end_time_unix_nano
        else:
            assert above.name in ("prefill", "decode")


def test_a_slow_bucket_leads_to_the_trace_of_a_request_in_it(collector: Collector) -> None:
    """Prometheus asks for OpenMetrics; who asks for the plain format gets no exemplars."""
    with traced(collector) as client:
        ask(client, "/v1/completions", prompt="x", max_tokens=2)
        plain = client.get("/metrics")
        prometheus = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
        asked = client.get("/metrics", headers=prometheus)
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    trace = collector.named("llm_request").trace_id.hex()
    exemplars = re.findall(r'^headrace:(\w+)_bucket\{.*\} \S+ # \{trace_id="(\w+)"\} (\S+) (\S+)$', asked.text, re.M)
    assert {"time_to_first_token_seconds", "e2e_request_latency_seconds"} <= {name for name, *_ in exemplars}
    assert {each[1] for each in exemplars} == {trace}
    assert "trace_id" not in plain.text
    families = text_string_to_metric_families(asked.text)  # raises for what is no OpenMetrics
    told = {sample.name for family in families for sample in family.samples if sample.exemplar}
    assert "headrace:request_prompt_tokens_bucket" in told


def test_a_request_that_nobody_samples_leaves_no_exemplar(collector: Collector) -> None:
    with traced(collector) as client:
        client.headers["traceparent"] = f"00-{TRACE}-{CALLER}-00"
        ask(client, "/v1/completions", prompt="x", max_tokens=2)
        assert "trace_id" not in client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text


def test_an_llm_exports_traces_of_its_requests(collector: Collector) -> None:
    options: Any = {"otlp_traces_endpoint": collector.url, "collect_detailed_traces": "model"}
    with LLM("null", in_process=True, **NULL, **options) as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        for _ in llm.stream("three", SamplingParams(max_tokens=2)):
            pass
    roots = [each for each in collector.spans if each.name == "llm_request"]
    assert sorted(attributes(each)["gen_ai.usage.completion_tokens"] for each in roots) == [2, 3, 3]
    assert len({each.trace_id for each in roots}) == 3
    assert {"queue", "prefill", "decode", "forward"} <= {each.name for each in collector.spans}


def test_an_async_llm_continues_its_callers_trace(collector: Collector) -> None:
    async def run() -> None:
        async with AsyncLLM("null", otlp_traces_endpoint=collector.url, **NULL) as llm:
            assert await llm.is_tracing_enabled()
            headers = {"TraceParent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1", "other": "x"}
            async for _ in llm.generate("x", SamplingParams(max_tokens=2), trace_headers=headers):
                pass

    asyncio.run(run())
    root = collector.named("llm_request")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, CALLER, "vendor=1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_detailed_traces": "all"}, "otlp_traces_endpoint"),
        ({"collect_detailed_traces": "everything"}, "allowed: model, worker, all"),
        ({"otlp_traces_endpoint": 4317}, "must be a text"),
    ],
)
def test_options_of_traces_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LLM("null", in_process=True, **options)
    if all(isinstance(each, str) for each in options.values()):
        with pytest.raises(OptionError, match=message):
            check_serve_options(ServeOptions(**options))
    with pytest.raises(OptionError, match=message):
        EngineArgs(model="null", **options)


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "carrier-pigeon")
    with pytest.raises(OptionError, match="allowed: grpc, http/protobuf"):
        Tracer("http://127.0.0.1:9")
