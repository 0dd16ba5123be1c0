"""The spans of a request:

    llm_request                 from its arrival to its last token; below the caller's span, if it names one
      tokenize                  its body read and decoded, the template rendered, the prompt tokenised
      grammar, gate             in the core: it waits until its grammar is compiled, or for another gate
      queue                     in the core: it waits for its first step
      prefill                   from the first step to the first token
        schedule                in the core: a step that it takes part in is planned
        execute                 from there until the core has the step's result
          forward               in the worker: the forward pass
      decode                    from the first token to the last; below it the same

      execute_tool NAME         another server carries out a tool that the model has called; it gets the trace's context

What is below `prefill` and `decode` is there on request only (`collect_detailed_traces`). A request with several
outputs has the times of the slowest one, and the steps of all.

All spans of a request are made at its end, without the SDK's live spans, which lock and copy at each change.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.tracing.options import details_of
from headrace.ipc.codec import Tensor
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import HeadraceError, OptionError, let_interrupts_pass
from headrace.ipc.messages import NUM_STEP_TIMES

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import SpanContext

logger = logging.getLogger(__name__)
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C's headers of trace context."""
_CLOSE_S = 5.0
_LONG_QUEUE = 1 << 14
"""Spans that may wait to be sent where steps have some, of which one request may have thousands."""
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
    last: RecordedTrace | None = None
    """Of the request that was submitted last: one from outside may submit several, in turn."""


_CURRENT: contextvars.ContextVar[Origin | None] = contextvars.ContextVar("origin", default=None)
"""Of the request that a task handles; None if it is not traced."""


def with_trace(request: CheckedRequest, origin: Origin | None = None) -> CheckedRequest:
    """The request, whose spans are exported once it has ended if it comes from an `origin`, by default the task's."""
    origin = origin or _CURRENT.get()
    return request if origin is None else origin.tracer.traced(request, origin)


@contextlib.contextmanager
def tokenizing() -> Iterator[None]:
    """Within it, the task's request is read, decoded and tokenised."""
    origin = _CURRENT.get()
    if origin is None:
        yield
        return
    began_s = time.time()
    yield
    origin.tokenize_began_s, origin.tokenize_ended_s = began_s, time.time()


@contextlib.contextmanager
def calling_tool(name: str) -> Iterator[None]:
    """Within it, a tool that the task's last request called is carried out by another server, which finds the trace's
    context as OpenTelemetry's current one."""
    origin = _CURRENT.get()
    if origin is None or origin.last is None:
        yield
        return
    with origin.tracer.tool(name, origin.last.root):
        yield


class Tracer:
    """Exports the spans of requests."""

    def __init__(self, endpoint: str, details: str | None = None) -> None:
        """endpoint: a collector's, http://HOST:4317 for gRPC or http://HOST:4318/v1/traces for HTTP. details: the
        option collect_detailed_traces.

        Raises OptionError without the extra otel, for unknown details, and for an unknown protocol in the environment.
        """
        self.details = details_of(details)
        try:
            from opentelemetry import context
            from opentelemetry import trace as api
            from opentelemetry.context import Context
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise _missing(error) from None
        provider = TracerProvider(
            resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "headrace"}),
            shutdown_on_exit=False,
        )
        # What the environment's variables of the SDK say, of which the provider is the reader.
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._resource = _hashed_once(provider.resource)
        self._scope = InstrumentationScope("headrace")
        is_long = self.details and not os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE")
        self._processor = BatchSpanProcessor(_exporter(endpoint), max_queue_size=_LONG_QUEUE if is_long else None)
        self._api, self._make_span, self._make_context = api, ReadableSpan, api.SpanContext  # found once
        self._context, self._nowhere = context, Context()

    def begin(self, headers: Mapping[str, str]) -> None:
        """The task handles a request with these CONTEXT_HEADERS, which has just arrived."""
        _CURRENT.set(self.origin(headers))

    def origin(self, headers: Mapping[str, str]) -> Origin:
        """Of a request with these CONTEXT_HEADERS, which has just arrived."""
        return Origin(tracer=self, headers=headers, arrived_s=time.time())

    def traced(self, request: CheckedRequest, origin: Origin) -> CheckedRequest:
        """The request with its trace, if the sampler wants it. A trace that cannot be begun is logged."""
        try:
            trace = self._begin_trace(origin)
        except Exception as error:
            let_interrupts_pass(error)
            logger.exception("the trace of a request could not be begun")
            return request
        return request if trace is None else msgspec.structs.replace(request, trace=trace)

    def close(self) -> None:
        """Sends what is complete; waits for that for at most _CLOSE_S."""
        self._processor.force_flush(int(_CLOSE_S * 1000))
        self._processor.shutdown()

    def _begin_trace(self, origin: Origin) -> RecordedTrace | None:
        api, called_from, parent = self._api, self._nowhere, None
        if origin.headers:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            called_from = TraceContextTextMapPropagator().extract(origin.headers, called_from)
            above = api.get_current_span(called_from).get_span_context()
            parent = above if above.is_valid else None
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        wanted = self._sampler.should_sample(called_from, trace_id, "llm_request", api.SpanKind.SERVER)
        if not wanted.decision.is_sampled():
            return None
        flags = api.TraceFlags(api.TraceFlags.SAMPLED)
        root = api.SpanContext(trace_id, self._ids.generate_span_id(), False, flags, wanted.trace_state)
        origin.last = RecordedTrace(self, origin, root, parent)
        return origin.last

    @contextlib.contextmanager
    def tool(self, name: str, caller: SpanContext) -> Iterator[None]:
        """Exports the span of what happens within, below the caller's; it is the current one of OpenTelemetry's API."""
        api, began_s, status = self._api, time.time(), None
        span = self._new_below(caller)
        token = self._context.attach(api.set_span_in_context(api.NonRecordingSpan(span), self._nowhere))
        try:
            yield
        except Exception as error:
            status = api.Status(api.StatusCode.ERROR, str(error)[:500])
            raise
        finally:
            self._context.detach(token)
            told = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
            whole = (f"execute_tool {name}", began_s, time.time(), told)
            self._end(span, caller, *whole, kind=api.SpanKind.CLIENT, status=status)

    def export(self, trace: RecordedTrace, stream: RequestStream) -> None:
        """Call at a request's end, successful or not."""
        api, metrics, origin = self._api, stream.metrics, trace.origin
        ended_s = time.time() if metrics.total_s is None else metrics.arrival_time + metrics.total_s
        for name, began_s, until_s in _parts(origin, stream):
            part = self._below(trace.root, name, began_s, until_s)
            if trace.steps and name in ("prefill", "decode"):
                self._export_steps(trace.steps_of(name, until_s - metrics.arrival_time), part, metrics.arrival_time)
        status = None if stream.error is None else api.Status(api.StatusCode.ERROR, str(stream.error)[:500])
        whole = ("llm_request", origin.arrived_s, ended_s, attributes_of(stream))
        self._end(trace.root, trace.parent, *whole, kind=api.SpanKind.SERVER, status=status)

    def _export_steps(self, steps: list[StepTimes], part: SpanContext, arrived_s: float) -> None:
        for each in steps:
            told = {"headrace.step.num_tokens": each.num_tokens}
            planned_s, submitted_s, taken_s = (arrived_s + at_s for at_s in each[:3])
            if "schedule" in self.details:
                self._below(part, "schedule", planned_s, submitted_s, told)
            above = part
            if "execute" in self.details:
                above = self._below(part, "execute", submitted_s, taken_s, told)
            if "forward" in self.details and each.ended_s:
                self._below(above, "forward", arrived_s + each.began_s, arrived_s + each.ended_s, told)

    def _below(
        self, parent: SpanContext, name: str, began_s: float, ended_s: float, told: Mapping[str, Any] | None = None
    ) -> SpanContext:
        """Exports a span below another one of the same trace, and returns its context."""
        span = self._new_below(parent)
        self._end(span, parent, name, began_s, ended_s, told)
        return span

    def _new_below(self, parent: SpanContext) -> SpanContext:
        trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
        return self._make_context(trace_id, self._ids.generate_span_id(), False, flags, state)

    def _end(
        self,
        context: SpanContext,
        parent: SpanContext | None,
        name: str,
        began_s: float,
        ended_s: float,
        told: Mapping[str, Any] | None,
        **more: Any,
    ) -> None:
        span = self._make_span(
            name,
            context,
            parent,
            self._resource,
            told,
            start_time=int(began_s * _NS),
            end_time=int(ended_s * _NS),
            instrumentation_scope=self._scope,
            **{key: value for key, value in more.items() if value is not None},
        )
        self._processor.on_end(span)


class StepTimes(NamedTuple):
    """A step that a request took part in: seconds since the request's arrival at the core."""

    planned_s: float
    submitted_s: float
    taken_s: float
    """When the core had its result."""
    began_s: float
    """When the forward pass began and ended, by the worker's clock; 0 if it is not known."""
    ended_s: float
    num_tokens: int


class RecordedTrace:
    """The trace of one request, whose spans are exported at its end."""

    __slots__ = ("_tracer", "origin", "parent", "root", "steps", "trace_id", "wants_steps")

    def __init__(self, tracer: Tracer, origin: Origin, root: SpanContext, parent: SpanContext | None) -> None:
        """root: of the span of the whole request; parent: of its caller's."""
        self._tracer, self.origin, self.root, self.parent = tracer, origin, root, parent
        self.trace_id = f"{root.trace_id:032x}"
        self.wants_steps = bool(tracer.details)
        self.steps: list[StepTimes] = []

    def note_steps(self, times: Tensor) -> None:
        """times: the rows of Finish.steps, [num_steps, NUM_STEP_TIMES] float64."""
        values = times.data.cast("d").tolist()
        for at in range(0, len(values), NUM_STEP_TIMES):
            *seconds, num_tokens = values[at : at + NUM_STEP_TIMES]
            self.steps.append(StepTimes._make([*seconds, int(num_tokens)]))

    def steps_of(self, part: str, ended_s: float) -> list[StepTimes]:
        """The steps of `prefill`, which ended then, or those behind it, of `decode`."""
        if part == "decode":
            return self.steps
        first, self.steps = self.steps, [each for each in self.steps if each.taken_s > ended_s]
        return [each for each in first if each.taken_s <= ended_s]

    def on_done(self, stream: RequestStream) -> None:
        try:
            self._tracer.export(self, stream)
        except Exception as error:
            let_interrupts_pass(error)
            logger.exception("the trace of a request could not be exported")


def tracer_of(endpoint: str | None, details: str | None) -> Tracer | None:
    """A tracer for these options; None without an endpoint. Raises OptionError."""
    return None if endpoint is None else Tracer(endpoint, details)


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


def _hashed_once(resource: Resource) -> Resource:
    """The same resource. The exporter hashes that of each span, for which the SDK writes all its attributes as JSON."""
    from opentelemetry.sdk.resources import Resource

    class HashedOnce(Resource):
        __hash__, __eq__ = object.__hash__, object.__eq__

    return HashedOnce(resource.attributes, resource.schema_url)


def attributes_of(stream: RequestStream) -> dict[str, Any]:
    """What vLLM tells of a request, under its names; without what is not known."""
    metrics, params = stream.metrics, stream.params
    inference_s = None
    if metrics.prefill_s is not None and metrics.decode_s is not None:
        inference_s = metrics.prefill_s + metrics.decode_s
    told = {
        "gen_ai.request.id": stream.request_id,
        "gen_ai.request.n": getattr(params, "n", None),
        "gen_ai.request.max_tokens": getattr(params, "max_tokens", None) or stream.max_tokens or None,
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
    return OptionError(f"otlp_traces_endpoint needs OpenTelemetry: {how_to_install('otel')} ({error})")
