"""The spans of a request:

    llm_request                 from its arrival to its last token; below the caller's span, if it names one
      tokenize                  its body read and decoded, the template rendered, the prompt tokenised
      grammar, gate             in the core: it waits until its grammar is compiled, or for another gate
      queue                     in the core: it waits for its first step
      prefill                   from the first step to the first token
      decode                    from the first token to the last

A request with several outputs has the times of the slowest one.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.frontend.client.request import RequestListener, RequestStream
from headrace.ipc.failure import HeadraceError, OptionError, let_interrupts_pass

logger = logging.getLogger(__name__)
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C's headers of trace context."""
_CLOSE_S = 5.0
_NS = 1_000_000_000


class Origin(msgspec.Struct, kw_only=True):
    """Where a traced request comes from, and what was done with it before it was submitted."""

    tracer: Tracer
    headers: Mapping[str, str]
    """Its CONTEXT_HEADERS."""
    arrived_s: float
    """Seconds since the epoch, as the other times are."""
    tokenize_began_s: float = 0.0
    """0: nothing of it has been tokenised."""
    tokenize_ended_s: float = 0.0


_CURRENT: contextvars.ContextVar[Origin | None] = contextvars.ContextVar("origin", default=None)
"""Of the request that a task handles; None if it is not traced."""


def follow(stream: RequestStream) -> None:
    """Exports the spans of a request that has just been submitted, once it has ended, if the task's request is
    traced."""
    if (origin := _CURRENT.get()) is not None:
        origin.tracer.follow(stream, origin)


@contextlib.contextmanager
def tokenizing() -> Iterator[None]:
    """Within it, the task's request is read, decoded and tokenised."""
    origin, began_s = _CURRENT.get(), time.time()
    yield
    if origin is not None:
        origin.tokenize_began_s, origin.tokenize_ended_s = began_s, time.time()


class Tracer:
    """Exports the spans of the requests that it follows."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: a collector's, http://HOST:4317 for gRPC or http://HOST:4318/v1/traces for HTTP.

        Raises OptionError without the extra otel, and for an unknown protocol in the environment.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise _missing(error) from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "headrace"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("headrace")

    def begin(self, headers: Mapping[str, str]) -> None:
        """The task handles a request with these CONTEXT_HEADERS, which has just arrived."""
        _CURRENT.set(Origin(tracer=self, headers=headers, arrived_s=time.time()))

    def follow(self, stream: RequestStream, origin: Origin) -> None:
        stream.trace = _Trace(self, origin)

    def close(self) -> None:
        """Sends what is complete; waits for that for at most _CLOSE_S."""
        self._provider.force_flush(int(_CLOSE_S * 1000))
        self._provider.shutdown()

    def export(self, origin: Origin, stream: RequestStream) -> None:
        """Call at a request's end, successful or not."""
        try:
            self._make_spans(origin, stream)
        except Exception as error:
            let_interrupts_pass(error)
            logger.exception("the trace of a request could not be exported")

    def _make_spans(self, origin: Origin, stream: RequestStream) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        metrics = stream.metrics
        submitted_s = metrics.arrival_time
        ended_s = submitted_s + metrics.total_s if metrics.total_s is not None else time.time()
        caller = TraceContextTextMapPropagator().extract(origin.headers)
        root = self._tracer.start_span(
            "llm_request",
            context=caller,
            kind=SpanKind.SERVER,
            attributes=attributes_of(stream),
            start_time=_ns(origin.arrived_s),
        )
        if root.is_recording():  # the sampler wants it
            if stream.error is not None:
                root.set_status(Status(StatusCode.ERROR, str(stream.error)[:500]))
            below = set_span_in_context(root)
            for name, began_s, until_s in _parts(origin, stream):
                self._tracer.start_span(name, context=below, start_time=_ns(began_s)).end(_ns(until_s))
        root.end(_ns(ended_s))


class _Trace(RequestListener):
    """Waits for the end of one request."""

    def __init__(self, tracer: Tracer, origin: Origin) -> None:
        self._tracer, self._origin = tracer, origin

    def on_done(self, stream: RequestStream) -> None:
        self._tracer.export(self._origin, stream)


def _parts(origin: Origin, stream: RequestStream) -> list[tuple[str, float, float]]:
    """Name, begin and end of each part that is known, in seconds since the epoch."""
    metrics, parts = stream.metrics, []
    if origin.tokenize_began_s:
        parts.append(("tokenize", origin.tokenize_began_s, origin.tokenize_ended_s))
    at_s = metrics.arrival_time
    for name, duration_s in (
        ("grammar" if getattr(stream.params, "structured_outputs", None) else "gate", metrics.gated_s or None),
        ("queue", None if metrics.queued_s is None else metrics.queued_s - metrics.gated_s),
        ("prefill", metrics.prefill_s),
        ("decode", metrics.decode_s),
    ):
        if duration_s is not None:
            parts.append((name, at_s, at_s + duration_s))
            at_s += duration_s
    return parts


def attributes_of(stream: RequestStream) -> dict[str, Any]:
    """What vLLM tells of a request, under its names; without what is not known."""
    metrics, params = stream.metrics, stream.params
    inference_s = None
    if metrics.prefill_s is not None and metrics.decode_s is not None:
        inference_s = metrics.prefill_s + metrics.decode_s
    told = {
        "gen_ai.request.id": stream.request_id,
        "gen_ai.request.n": getattr(params, "n", None),
        "gen_ai.request.max_tokens": getattr(params, "max_tokens", None) or stream.request.max_tokens or None,
        "gen_ai.request.temperature": getattr(params, "temperature", None),
        "gen_ai.request.top_p": getattr(params, "top_p", None),
        "gen_ai.usage.prompt_tokens": len(stream.prompt.token_ids or ()),
        "gen_ai.usage.completion_tokens": metrics.num_generation_tokens,
        "gen_ai.usage.num_sequences": getattr(params, "n", None),
        "gen_ai.latency.time_to_first_token": metrics.first_token_latency,
        "gen_ai.latency.e2e": metrics.total_s,
        "gen_ai.latency.time_in_queue": metrics.queued_s,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_s,
        "gen_ai.latency.time_in_model_decode": metrics.decode_s,
        "gen_ai.latency.time_in_model_inference": inference_s,
    }
    return {name: value for name, value in told.items() if value is not None}


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get(PROTOCOL_VARIABLE) or "grpc"
    if protocol not in _EXPORTERS:
        raise OptionError(f"{PROTOCOL_VARIABLE}={protocol} is unknown; allowed: {', '.join(_EXPORTERS)}")
    try:
        module = importlib.import_module(_EXPORTERS[protocol])
    except ImportError as error:
        raise _missing(error) from None
    more: dict[str, Any] = {}
    if protocol == "grpc":
        more["insecure"] = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "").lower() in ("1", "true")
    try:
        return module.OTLPSpanExporter(endpoint=endpoint, **more)
    except Exception as error:
        raise HeadraceError(f"otlp_traces_endpoint={endpoint}: {error}") from error


def _missing(error: ImportError) -> OptionError:
    return OptionError(
        f"otlp_traces_endpoint needs OpenTelemetry: in Headrace's clone, pip install '.[otel]' ({error})"
    )


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
