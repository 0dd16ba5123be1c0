"""`AsyncLLM`: the asynchronous API. Its client runs in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from headrace.frontend.api.batch import default_params, params_for
from headrace.frontend.api.beam_search import BeamSearchAbort, BeamSearchParams, as_request_output, beam_search
from headrace.frontend.api.chat_answers import AnswerReader, take_parsers
from headrace.frontend.api.chat_prompts import chat_options, chat_prompt
from headrace.frontend.api.pooling_calls import pooling_params_for
from headrace.frontend.api.streaming_input import StreamingInput, StreamingSession
from headrace.frontend.client.client import CONNECT_TIMEOUT_S, RequestClient
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call
from headrace.frontend.client.engine_metrics import Metric
from headrace.frontend.client.own_engine import STOP_DEADLINE_S, parse_own
from headrace.frontend.client.request_metrics import RequestCounts
from headrace.frontend.client.transport import Transport
from headrace.frontend.fleet.adapters import FleetAdapters
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.fleet.lora_controls import AsyncLoRAControls
from headrace.frontend.fleet.options import router_options
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.requests import id_in_use
from headrace.frontend.fleet.sources import Attached, Connected, Reconnecting, Source
from headrace.frontend.fleet.start import pool_of
from headrace.frontend.request.checks import check, checked_id
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.names import random_names
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.pooling_outputs import PoolingOutput, PoolingRequestOutput
from headrace.frontend.request.pooling_prompts import tokenize_to_pool
from headrace.frontend.request.prompts import (
    DEFAULT_TOKENIZATION,
    Prompt,
    Tokenization,
    parse_single_prompt,
    tokenization_of,
    tokenize,
)
from headrace.frontend.text.template_renderer import renderer, without_blocking
from headrace.frontend.tracing.options import take_traces
from headrace.frontend.tracing.tracer import CONTEXT_HEADERS, tracer_of, with_trace
from headrace.frontend.vllm.engine_config import EngineConfig, ModelConfig, SchedulerConfig, engine_config, tasks_of
from headrace.frontend.vllm.helpers import EngineSignature, TokenizerToAwait, tokenizer_of_engine
from headrace.frontend.vllm.stat_loggers import Factory, StatLoggers
from headrace.frontend.vllm.unsupported import NamesWhatIsMissing, check_arguments
from headrace.ipc.failure import EngineDeadError, HeadraceError, InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.client.request_stream import RequestStream
    from headrace.frontend.text.chat_template import Message
    from headrace.frontend.tracing.tracer import Origin, Tracer
    from headrace.frontend.vllm.engine_keywords import EngineOptions
    from headrace.frontend.vllm.llm_engine import EngineArgs
    from headrace.ipc.messages import Welcome

_TOKENIZE_INLINE_CHARACTERS = 16384
"""Longer texts are tokenised in a thread, so that other requests' streams do not wait for it."""
_DRAIN_LOOK_S = 0.02


class AsyncLLM(AsyncControls, AsyncLoRAControls, NamesWhatIsMissing):
    """A language model for one asyncio loop.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello"):
                print(output.outputs[0].text)

    Every method raises EngineDeadError, with the cause, when the engine has died.
    """

    __signature__: ClassVar[EngineSignature] = EngineSignature("model", "heartbeat_timeout")

    def __init__(
        self, model: str | None = None, *, heartbeat_timeout: float | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        """Starts an engine-core without waiting for it; the first call waits.

        heartbeat_timeout, and the options of traces: as LLM's.

        Raises OptionError for a bad or unknown option. If the engine fails to start, the first call raises
        EngineStartError with the cause.
        """
        routing = router_options(heartbeat_timeout)
        engine_options: dict[str, Any] = {**options}
        tracer = tracer_of(*take_traces(engine_options))
        parsed = parse_own(model, engine_options)
        self._prepare(pool_of(parsed, routing, RequestCounts()), tracer, parsed.use_tqdm_on_load)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, stat_loggers: Sequence[Factory] | None = None, **others: Any
    ) -> Self:
        """Starts an engine-core without waiting for it; the first call waits.

        stat_loggers: user-defined classes that record the engine's load (see stat_loggers.py).
        `others` are vLLM's further arguments; each must be None or a value that has no effect.
        """
        check_arguments("from_engine_args", others)
        loggers = StatLoggers(stat_loggers)
        if stat_loggers:
            loggers.check_number(vars(engine_args).get("data_parallel_size") or 1)
        self = cls(**vars(engine_args))
        self._stat_loggers = loggers
        return self

    @classmethod
    async def connect(
        cls,
        address: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        keys: str | None = None,
        reconnect: bool = False,
    ) -> AsyncLLM:
        """Attaches to the engine-core that listens at `address`. Closing detaches, and leaves the engine running.

        keys, reconnect, and what it raises: see LLM.connect.
        """
        kind = Reconnecting if reconnect else Attached
        return await cls._attach(kind(address, keys=keys, comes_back=reconnect, timeout_s=timeout_s))

    @classmethod
    async def attach(cls, transport: Transport, timeout_s: float = CONNECT_TIMEOUT_S) -> AsyncLLM:
        """Attaches over any transport, such as a MemoryTransport to a core in this process. Raises as `connect`."""
        return await cls._attach(Connected(transport, timeout_s))

    @classmethod
    async def _attach(cls, source: Source) -> AsyncLLM:
        self = cls.__new__(cls)
        self._prepare(EnginePool([source], meters=RequestCounts()))
        await self._ready()
        return self

    def _prepare(self, client: EnginePool, tracer: Tracer | None = None, shows_start: bool | None = False) -> None:
        """shows_start: the option use_tqdm_on_load."""
        self._client, self._tracer, self._shows_start = client, tracer, shows_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None  # of `shutdown`
        self._closed = False
        self._process_id = os.getpid()
        self._request_ids = random_names()
        self._sessions: dict[str, StreamingSession | BeamSearchAbort] = {}
        """What consists of several requests, by the name that `abort` is given."""
        self._stat_loggers = StatLoggers(None)
        renderer().use()
        self._stop_engines = weakref.finalize(self, _stop_engines, self._process_id, client, tracer)

    async def start(self) -> None:
        """Waits until the engine is ready. Calling it is optional: every other call waits too."""
        await self._ready()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one prompt, each with all text so far unless `sampling_params.output_kind` asks for
        deltas, which `LLM.stream` yields.

        An asynchronous generator of StreamingInput is a prompt that arrives in pieces (see streaming_input.py).
        `data_parallel_rank` selects the engine that runs the request first, if there are several. `trace_headers` are
        W3C's traceparent and tracestate, of the span that the request's is below, if traces are exported.

        Ending the iteration early, or cancelling its task, aborts the request. A slow reader gets fewer, larger
        outputs. Raises InvalidRequestError (also for a `request_id` that is running), QueueFullError,
        RequestFailedError.
        """
        check_arguments("generate", others)
        how = tokenization_of(tokenization_kwargs)
        if isinstance(prompt, AsyncGenerator):
            if data_parallel_rank is not None:
                raise InvalidRequestError("data_parallel_rank is not supported with streaming input: leave it out")
            pieces = self._generate_from_pieces(prompt, sampling_params, request_id, priority, how, lora_request)
            async with contextlib.aclosing(pieces):
                async for output in pieces:
                    yield output
            return
        origin = self._origin(trace_headers)
        stream = await self._submit(
            prompt, sampling_params, request_id, priority, data_parallel_rank, how, origin, lora_request
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields one output: the prompt's vectors, as `pooling_params` ask for them. Errors are those of `generate`."""
        check_arguments("encode", others)
        origin = self._origin(trace_headers)
        how, client = tokenization_of(tokenization_kwargs), await self._ready()
        parsed = parse_single_prompt(prompt)
        (params,) = pooling_params_for(pooling_params, 1, None)
        tokenized = functools.partial(tokenize_to_pool, [parsed], [params], client.tokenizer, how, client.welcome)
        is_long = len(parsed.text or "") > _TOKENIZE_INLINE_CHARACTERS
        await (asyncio.to_thread(tokenized) if is_long else without_blocking(tokenized))
        await client.adapters.give([parsed], lora_request)
        name = self._name_of(request_id, client)
        stream: Any = client.submit(with_trace(check(name, parsed, params, client, priority), origin))
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        **others: Any,
    ) -> RequestStream:
        """Submits one prompt; `await get()` on the stream returned waits for the next output. Raises as `generate`."""
        check_arguments("add_request", others)
        how = tokenization_of(tokenization_kwargs)
        origin = self._origin(trace_headers)
        return await self._submit(prompt, params, request_id, priority, data_parallel_rank, how, origin, lora_request)

    async def _generate_from_pieces(
        self,
        pieces: AsyncGenerator[StreamingInput, None],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        how: Tokenization,
        lora: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self._ready()
        name = self._name_of(request_id, client)

        async def prompt_of(piece: Any) -> Prompt:
            parsed = parse_single_prompt(piece)
            await _tokenize(parsed, client, how)
            await client.adapters.give([parsed], lora)
            return parsed

        session = self._sessions[name] = StreamingSession(client, name, priority, prompt_of)
        outputs = session.outputs(pieces, params or default_params(client.welcome))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            del self._sessions[name]

    async def _submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        rank: int | None,
        how: Tokenization = DEFAULT_TOKENIZATION,
        origin: Origin | None = None,
        lora: LoRARequest | None = None,
    ) -> RequestStream:
        client = await self._ready()
        parsed = parse_single_prompt(prompt)
        await _tokenize(parsed, client, how)
        await client.adapters.give([parsed], lora)
        kind = RequestOutputKind.CUMULATIVE
        if isinstance(sampling_params, SamplingParams):
            kind = sampling_params.output_kind
        (params,) = params_for(sampling_params, client.welcome, 1, kind)
        name = self._name_of(request_id, client)
        affinity = ANYWHERE if rank is None else Affinity(rank=rank)
        return client.submit(with_trace(check(name, parsed, params, client, priority), origin), affinity=affinity)

    def _name_of(self, request_id: str | None, client: EnginePool) -> str:
        """The name of a new request. Raises InvalidRequestError for one that is in use."""
        if request_id is None:
            return next(self._request_ids)
        name = checked_id(request_id)
        if name in self._sessions or name in client:
            raise id_in_use(name)
        return name

    def _origin(self, headers: Mapping[str, str] | None) -> Origin | None:
        """Of a request that has just arrived, with these headers; None if this object exports no traces."""
        if self._tracer is None:
            return None
        given = {name.lower(): value for name, value in (headers or {}).items()}
        return self._tracer.origin({name: given[name] for name in CONTEXT_HEADERS if name in given})

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one conversation. `template_options` are those of `LLM.chat`, the rest is as in `generate`."""
        how = tokenization_of(template_options.pop("tokenization_kwargs", None))
        parsers = take_parsers(template_options)
        options = chat_options(template_options)
        tokenizer = await self.get_tokenizer()
        render = functools.partial(chat_prompt, tokenizer, messages, options, await self.engine())
        is_long = sum(len(str(message)) for message in messages) > _TOKENIZE_INLINE_CHARACTERS
        prompt = await (asyncio.to_thread(render) if is_long else without_blocking(render))
        reader = AnswerReader(tokenizer, prompt.text or "", options, parsers)
        is_delta = sampling_params is not None and sampling_params.output_kind is RequestOutputKind.DELTA
        how.apply(prompt, await self.engine())
        if reader.is_strict:
            sampling_params = reader.constrain(prompt, sampling_params or await self.get_default_sampling_params())
        outputs = self.generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                reader.read(output, is_delta=is_delta)
                yield output

    async def beam_search(
        self, prompt: Any, request_id: str | None, params: BeamSearchParams, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields one RequestOutput whose outputs are the likeliest continuations, best first (see beam_search.py).

        Raises as `generate` does.
        """
        client = await self._ready()
        parsed = parse_single_prompt(prompt)
        await _tokenize(parsed, client)
        await client.adapters.give([parsed], lora_request)
        name = self._name_of(request_id, client)
        aborting = self._sessions[name] = BeamSearchAbort()
        try:
            (found,) = await beam_search(client, [parsed], params, self._request_ids, aborting)
        finally:
            del self._sessions[name]
        yield as_request_output(name, parsed, found, params, client)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests with finish_reason `abort`; ids that are not running are ignored.

        internal: unused. vLLM has separate internal ids; here a request has one id.
        """
        ids = (request_id,) if isinstance(request_id, str) else request_id
        try:
            names: tuple[Any, ...] = tuple(ids)
        except TypeError:
            names = (ids,)
        if not all(isinstance(each, str) for each in names):
            raise InvalidRequestError(f"abort: request_id must be one or several texts, not {request_id!r:.80}")
        client = await self._ready()
        client.abort(names)
        for name in names:
            if name in self._sessions:
                self._sessions[name].abort()

    async def _fleet_adapters(self) -> FleetAdapters:
        return (await self._ready()).adapters

    async def get_metrics(self, prefix: str = "vllm") -> list[Metric]:
        return await (await self._ready()).get_metrics(prefix)

    async def do_log_stats(self) -> None:
        await super().do_log_stats()
        await self._stat_loggers.log()

    def get_tokenizer(self, *, hf: bool = False) -> Any:
        """The engine's tokenizer (frontend/text/tokenizer.py:Tokenizer), or with `hf` transformers', if installed.

        The result may be awaited or, once the engine has started, used directly: vLLM's method was asynchronous, and
        is synchronous now. Raises InvalidRequestError when the engine runs without a tokenizer, or transformers has
        none for the model.
        """
        return TokenizerToAwait(functools.partial(self._find_tokenizer, hf), None if hf else self._started_tokenizer)

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def _started_tokenizer(self) -> Any:
        self._check_started("await get_tokenizer()")
        return _tokenizer_of(self._client)

    async def _find_tokenizer(self, hf: bool) -> Any:
        client = await self._ready()
        own = _tokenizer_of(client)
        if hf:
            options = (await client.describe_engine()).options
            return await asyncio.to_thread(tokenizer_of_engine, options, client.welcome.model)
        return own

    async def get_vllm_config(self) -> EngineConfig:
        return engine_config((await self._ready()).welcome)

    async def get_model_config(self) -> ModelConfig:
        return (await self.get_vllm_config()).model_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        return (await self.get_vllm_config()).scheduler_config

    @property
    def vllm_config(self) -> EngineConfig:
        """Raises HeadraceError before the engine has started."""
        self._check_started("await start() first")
        return engine_config(self._client.welcome)

    def _check_started(self, hint: str) -> None:
        if not self._has_started:
            raise HeadraceError(f"the engine has not started: {hint}")

    @property
    def _has_started(self) -> bool:
        return self._starting is not None and self._starting.done() and self._client.started.is_set()

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted; also True while the engine starts."""
        return not self._closed and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._has_started and self._client.failure is not None and not self._closed

    @property
    def dead_error(self) -> BaseException:
        """The error that every method raises once the engine has died."""
        failure = self._client.failure if self._has_started else None
        return EngineDeadError("the engine is alive") if failure is None else EngineDeadError.from_failure(failure)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return tasks_of(await self.engine())

    async def is_tracing_enabled(self) -> bool:
        return self._tracer is not None

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300.0) -> None:
        """Returns once no request runs or waits in the engine. Raises TimeoutError after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            while (stats := await self.get_stats()).num_running or stats.num_waiting:
                await asyncio.sleep(_DRAIN_LOOK_S)

    async def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses when none are given: the defaults, with the fields that the model's
        generation config sets."""
        return default_params((await self._ready()).welcome)

    async def engine(self) -> Welcome:
        """The engine's description of itself: model, limits, start-up times."""
        return (await self._ready()).welcome

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has died or is shutting down."""
        (await self._ready()).check_alive()

    async def close(self) -> None:
        """Aborts running requests, and stops the engine if this object started it. May be called again, and in another
        event loop than the one that this object is bound to."""
        if self._loop not in (None, asyncio.get_running_loop()):
            await asyncio.to_thread(self.shutdown)
            return
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self._stat_loggers.stop()
        await self._client.close(STOP_DEADLINE_S)
        await asyncio.to_thread(self._stop_engines)

    def shutdown(self, timeout: float | None = None) -> None:
        """`close` without asyncio, as in vLLM: running requests fail, and it blocks until the engine has ended.

        timeout: unused. The shutdown has its own limit, after which the engine is killed.
        """
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._in_loop(self._starting.cancel)
        self._stop_engines()
        if self._has_started and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_client)  # the loop may never run again

    def _in_loop(self, callback: Callable[[], object]) -> None:
        """Calls it: at once, unless the loop runs on another thread."""
        here = asyncio._get_running_loop()  # None on a thread without one
        if self._loop is None or self._loop is here or not self._loop.is_running():
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    def _close_client(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self._client.close(STOP_DEADLINE_S))

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Sends a control message, and returns the result in its Reply."""
        return await (await self._ready()).call(kind, timeout_s, **fields)

    async def _ready(self) -> EnginePool:
        """The client, once the engine has started. The first call binds this object to its event loop.

        Raises HeadraceError in another loop, in a forked process, and after `close`.
        """
        if self._closed:
            raise HeadraceError("this AsyncLLM is closed")
        if os.getpid() != self._process_id:
            raise HeadraceError(
                f"this AsyncLLM belongs to process {self._process_id}, and this one was forked from it: create one "
                "here, or attach to a running engine with AsyncLLM.connect(address)"
            )
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if loop is not self._loop:
            raise HeadraceError(
                "this AsyncLLM is in use in another asyncio loop: create one in each, or run everything in one loop"
            )
        if self._has_started:
            if self._client.may_wait:
                await self._client.until_usable()
            return self._client
        if self._starting is None:
            self._starting = loop.create_task(self._start())
        # Shielded: cancelling one caller must not cancel the start that others wait for.
        try:
            await asyncio.shield(self._starting)
            return self._client
        except asyncio.CancelledError:
            if self._closed:
                raise HeadraceError("this AsyncLLM was closed while it started") from None
            raise

    async def _start(self) -> None:
        await self._client.open(CONNECT_TIMEOUT_S, shows_start=self._shows_start)
        try:
            await self._stat_loggers.start(self._client, engine_config(self._client.welcome))
        except BaseException:
            await self._client.close(STOP_DEADLINE_S)
            raise


def _tokenizer_of(client: EnginePool) -> Any:
    if client.tokenizer is None:
        raise InvalidRequestError("this engine runs without a tokenizer (its option skip_tokenizer_init)")
    return client.tokenizer


async def _tokenize(prompt: Prompt, client: RequestClient, how: Tokenization = DEFAULT_TOKENIZATION) -> None:
    if prompt.token_ids is None and len(prompt.text or "") > _TOKENIZE_INLINE_CHARACTERS:
        await asyncio.to_thread(tokenize, [prompt], client, how)
    else:
        await without_blocking(lambda: tokenize([prompt], client, how))


def _stop_engines(process_id: int, client: EnginePool, tracer: Tracer | None) -> None:
    if os.getpid() == process_id:  # not a forked copy
        if tracer is not None:
            tracer.close()
        renderer().leave()
        client.stop(STOP_DEADLINE_S)
