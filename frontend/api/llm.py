"""`LLM`: the synchronous API. It runs a client in a background thread and, unless attached, an engine-core child."""

from __future__ import annotations

import contextlib
import numbers
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack

from headrace.frontend.api.batch import (
    RequestBatch,
    SharedBar,
    checked_requests,
    default_params,
    enqueue_requests,
    finish_requests,
    params_for,
)
from headrace.frontend.api.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from headrace.frontend.api.chat_answers import AnswerReader, take_parsers
from headrace.frontend.api.chat_prompts import chat_options, chat_prompts
from headrace.frontend.api.pooling_calls import PoolingCalls
from headrace.frontend.api.sync_stream import Pump, Put, SyncStream
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.client.client import CONNECT_TIMEOUT_S
from headrace.frontend.client.control import Controls
from headrace.frontend.client.own_engine import STOP_DEADLINE_S, parse_own, run_in_process
from headrace.frontend.client.request_metrics import RequestCounts
from headrace.frontend.client.transport import MemoryTransport, Transport
from headrace.frontend.fleet.lora_controls import LoRAControls
from headrace.frontend.fleet.options import router_options
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Attached, Connected, Reconnecting
from headrace.frontend.fleet.start import pool_of
from headrace.frontend.request.checks import CheckedRequest, check
from headrace.frontend.request.lists import elements
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.names import free_numbers
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import (
    DEFAULT_TOKENIZATION,
    Prompt,
    Tokenization,
    parse_prompts,
    parse_single_prompt,
    tokenization_of,
    tokenize,
)
from headrace.frontend.text.template_renderer import renderer
from headrace.frontend.tracing.options import take_traces
from headrace.frontend.tracing.tracer import tracer_of
from headrace.frontend.vllm.engine_config import ModelConfig, engine_config, tasks_of
from headrace.frontend.vllm.helpers import EngineSignature, tokenizer_of_engine
from headrace.frontend.vllm.stat_loggers import StatLoggers
from headrace.frontend.vllm.unsupported import NamesWhatIsMissing, check_arguments
from headrace.ipc.failure import HeadraceError, InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.client.request_stream import RequestStream
    from headrace.frontend.text.chat_template import Message
    from headrace.frontend.tracing.tracer import Tracer
    from headrace.frontend.vllm.engine_keywords import EngineOptions
    from headrace.frontend.vllm.llm_engine import EngineArgs, LLMEngine
    from headrace.ipc.messages import Welcome

T = TypeVar("T")


class LLM(Controls, LoRAControls, PoolingCalls, NamesWhatIsMissing):
    """A language model to call. Thread-safe; a context manager; closes when it is garbage-collected or Python exits.

        with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            print(llm.generate("Hello")[0].outputs[0].text)

    Every method raises EngineDeadError, with the cause, when the engine has died.
    """

    __signature__: ClassVar[EngineSignature] = EngineSignature("model", "in_process", "heartbeat_timeout")
    _client: EnginePool

    def __init__(
        self,
        model: str | None = None,
        *,
        in_process: bool = False,
        heartbeat_timeout: float | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Starts an engine-core. `options` are those of `engine-core --help`, with underscores.

        With `in_process` the core is a thread of this process instead of a child: easier to debug, but torch is then
        loaded here, and a crash of the engine ends this process.

        heartbeat_timeout: with several engines, how long one that runs requests may be silent before they continue on
        another; None: 2 s, the default of `headrace serve`.

        The options otlp_traces_endpoint and collect_detailed_traces say where traces of requests go, and which spans
        of steps they have (docs/server.md, Traces); they need the extra otel.

        Raises OptionError for a bad or unknown option, and EngineStartError with the cause if the engine fails to
        start (in process: the original error).
        """
        routing = router_options(heartbeat_timeout)
        engine_options: dict[str, Any] = {**options}
        tracer = tracer_of(*take_traces(engine_options))
        if in_process:
            thread = run_in_process(model, engine_options)
            source = Connected(MemoryTransport(thread.port), engine=thread)
            self._open(EnginePool([source], meters=RequestCounts()), tracer)
            return
        parsed = parse_own(model, engine_options)
        self._open(pool_of(parsed, routing, RequestCounts()), tracer, shows_start=parsed.use_tqdm_on_load)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Starts an engine-core with these options. Raises as `LLM(...)` does."""
        return cls(**vars(engine_args))

    @classmethod
    def connect(
        cls, address: str, timeout_s: float = CONNECT_TIMEOUT_S, *, keys: str | None = None, reconnect: bool = False
    ) -> LLM:
        """Attaches to the engine-core that listens at `address`. Closing detaches, and leaves the engine running.

        keys: the key file for a tcp:// address (`headrace keys`), by default the one that HEADRACE_KEYS names.
        reconnect: when the engine is lost, requests wait up to 30 s for one at the same address, and continue there;
        without it they fail at once, and so does this LLM from then on.

        Raises EngineDeadError when no engine listens there, and AddressError for an invalid address.
        """
        self = cls.__new__(cls)
        kind = Reconnecting if reconnect else Attached
        source = kind(address, keys=keys, comes_back=reconnect, timeout_s=timeout_s)
        self._open(EnginePool([source], meters=RequestCounts()))
        return self

    @classmethod
    def attach(cls, transport: Transport, timeout_s: float = CONNECT_TIMEOUT_S) -> LLM:
        """Attaches over any transport, such as a MemoryTransport to a core in this process. Raises as `connect`."""
        self = cls.__new__(cls)
        self._open(EnginePool([Connected(transport, timeout_s)], meters=RequestCounts()))
        return self

    def _open(self, client: EnginePool, tracer: Tracer | None = None, *, shows_start: bool | None = False) -> None:
        try:
            self._background = BackgroundLoop("headrace-llm")
        except BaseException:
            client.stop(0.0)
            raise
        self._client, self._tracer = client, tracer
        self._process_id = os.getpid()
        self._request_ids = free_numbers(client.__contains__)
        self._enqueued: list[tuple[RequestStream, AnswerReader | None]] = []
        self._engine: LLMEngine | None = None
        self._bars = SharedBar()
        self._stat_loggers = StatLoggers(None)
        renderer().use()
        # Runs once: at close, when this object is collected, or when the interpreter exits.
        self._close = weakref.finalize(self, _shut_down, self._process_id, self._background, client, tracer)
        try:
            self._background.run(client.open(CONNECT_TIMEOUT_S, shows_start=shows_start))
        except BaseException:
            self._close()
            raise

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes prompts, and returns their final outputs in order.

        A prompt is a text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`, either with a
        `cache_salt`; `prompts` is one or a list of them. Without `sampling_params` the model's defaults apply.
        `lora_request` names an adapter for all prompts, or one (or None) for each.
        `use_tqdm` may be a callable that makes the progress bar, and `tokenization_kwargs` has the fields of
        prompts.py:Tokenization. `others` are vLLM's further arguments; each must be None or a value that has no
        effect.

        Raises InvalidRequestError before any request runs, or later if a request's constraints leave no token to
        sample; RequestFailedError; QueueFullError.
        """
        self._check_usable()
        if others:
            check_arguments("generate", others)
        how = tokenization_of(tokenization_kwargs) if tokenization_kwargs else DEFAULT_TOKENIZATION
        parsed = self._tokenized(parse_prompts(prompts), how)
        if lora_request is not None:
            self._use_loras(parsed, lora_request)
        return self._run(self._requests(parsed, sampling_params, priority), use_tqdm)

    def _requests(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[CheckedRequest]:
        params = params_for(sampling_params, self._client.welcome, len(prompts), RequestOutputKind.FINAL_ONLY)
        requests = checked_requests(self._client, prompts, params, priority, self._request_ids)
        return requests if self._tracer is None else [self._traced(request) for request in requests]

    def _traced(self, request: CheckedRequest) -> CheckedRequest:
        """The request, with a trace if this object exports traces."""
        return request if self._tracer is None else self._tracer.traced(request, self._tracer.origin({}))

    def _run(self, requests: list[CheckedRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        if not use_tqdm:
            return self._background.run(RequestBatch(self._client, requests).run())
        with self._bars.open(len(requests), use_tqdm) as bar:
            return self._background.run(RequestBatch(self._client, requests, bar.add).run(), bar.show)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them.

        `template_options`: add_generation_prompt (True unless continue_final_message), continue_final_message,
        chat_template (its text, or the name of one of the model's), chat_template_content_format (auto, string or
        openai: how the template gets a message's content), tools, documents, and chat_template_kwargs, a dict of
        further template variables. With tools, outputs have a `message` that holds the parsed calls; tool_call_parser
        (by default auto) and reasoning_parser name formats as the server's options do. With `strict` in a tool, calls
        fit the schemas of all tools. Raises as `generate` does.
        """
        self._check_usable()
        prompts, readers = self._conversations(messages, template_options)
        self._use_loras(prompts, lora_request)
        sampling_params = self._strict(prompts, readers, sampling_params)
        outputs = self._run(self._requests(prompts, sampling_params, priority), use_tqdm)
        for reader, output in zip(readers, outputs, strict=True):
            reader.read(output)
        return outputs

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[str]:
        """Submits conversations and returns their request ids, as `enqueue` does for prompts. Arguments and errors are
        those of `chat`."""
        self._check_usable()
        prompts, readers = self._conversations(messages, template_options)
        self._use_loras(prompts, lora_request)
        return self._enqueue(prompts, readers, self._strict(prompts, readers, sampling_params), priority)

    def _strict(
        self,
        prompts: Sequence[Prompt],
        readers: Sequence[AnswerReader],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> SamplingParams | Sequence[SamplingParams] | None:
        """The sampling parameters with the forms that tools with `strict` need; unchanged if there are none."""
        if not any(reader.is_strict for reader in readers):
            return given
        params = params_for(given, self._client.welcome, len(prompts), RequestOutputKind.FINAL_ONLY)
        work = zip(readers, prompts, params, strict=True)
        return [reader.constrain(prompt, each) for reader, prompt, each in work]

    def _conversations(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], template_options: dict[str, Any]
    ) -> tuple[list[Prompt], list[AnswerReader]]:
        """The tokenised prompts of conversations, and a reader for the answers to each."""
        several = elements(messages)
        if several is None:
            raise InvalidRequestError(f"messages must be a list of dicts, not {type(messages).__name__}")
        one = not several or isinstance(several[0], Mapping)
        conversations: Sequence[Any] = [several] if one else several
        how = tokenization_of(template_options.pop("tokenization_kwargs", None))
        parsers = take_parsers(template_options)
        options = chat_options(template_options)
        tokenizer = self.get_tokenizer()
        prompts = chat_prompts(tokenizer, conversations, options, self._client.welcome)
        readers = [AnswerReader(tokenizer, prompt.text or "", options, parsers) for prompt in prompts]
        return self._tokenized(prompts, how), readers

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[str]:
        """Submits prompts and returns their request ids without waiting; `wait_for_completion` returns the outputs.

        Arguments and errors are those of `generate`. use_tqdm, in vLLM a progress bar of the submission, is unused.
        """
        self._check_usable()
        check_arguments("enqueue", others)
        parsed = self._tokenized(parse_prompts(prompts), tokenization_of(tokenization_kwargs))
        self._use_loras(parsed, lora_request)
        return self._enqueue(parsed, [None] * len(parsed), sampling_params, priority)

    def _enqueue(
        self,
        prompts: list[Prompt],
        readers: Sequence[AnswerReader | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[str]:
        requests = self._requests(prompts, sampling_params, priority)
        streams = self._background.run(enqueue_requests(self._client, requests))
        self._enqueued += zip(streams, readers, strict=True)
        return [stream.request_id for stream in streams]

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """The final outputs of all enqueued requests, in order. Raises the first error, and aborts the others."""
        self._check_usable()
        if output_type not in (None, RequestOutput):
            raise InvalidRequestError(f"output_type is {output_type!r}: requests give RequestOutput")
        with self._bars.open(len(self._enqueued), use_tqdm) as bar:
            enqueued, self._enqueued = self._enqueued, []
            streams = [stream for stream, _ in enqueued]
            outputs = self._background.run(finish_requests(streams, bar.add), bar.show)
        for (_, reader), output in zip(enqueued, outputs, strict=True):
            if reader is not None:
                reader.read(output)
        return outputs

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts, by beam search (see beam_search.py). `prompts` as in `generate`.

        concurrency_limit: how many prompts are searched at a time; None means all.
        """
        self._check_usable()
        parsed = self._tokenized(parse_prompts(prompts))
        self._use_loras(parsed, lora_request)
        at_once = max(1, len(parsed)) if concurrency_limit is None else concurrency_limit
        if isinstance(at_once, bool) or not isinstance(at_once, numbers.Integral) or at_once < 1:
            raise InvalidRequestError(f"concurrency_limit = {concurrency_limit!r:.100}: must be at least 1")
        found: list[BeamSearchOutput] = []
        with self._bars.open(len(parsed), use_tqdm) as bar:
            for first in range(0, len(parsed), at_once):
                some = parsed[first : first + at_once]
                found += self._background.run(beam_search(self._client, some, params, self._request_ids))
                bar.update(len(some))
        return found

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: Any,
    ) -> SyncStream:
        """Streams the completion of one prompt: an iterator of RequestOutputs that each hold only the new part (DELTA),
        where `AsyncLLM.generate` yields all text so far unless `output_kind` asks for deltas.

        Closing it (or leaving its `with` block, or dropping it) aborts the request. Raises as `generate` does.
        """
        check_arguments("stream", others)
        request = self._prepare(None, prompt, sampling_params, RequestOutputKind.DELTA, priority, lora=lora_request)
        return SyncStream(self._background, self._client, request, owner=self)

    def start_request(
        self,
        request_id: str,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int,
        put: Put,
        how: Tokenization = DEFAULT_TOKENIZATION,
        lora: LoRARequest | None = None,
    ) -> Pump:
        """Submits one prompt; the client's thread calls `put` with each output (see sync_stream.py).

        Outputs are cumulative unless `sampling_params.output_kind` says otherwise. Raises as `generate` does.
        """
        kind = sampling_params.output_kind if sampling_params is not None else RequestOutputKind.CUMULATIVE
        request = self._prepare(request_id, prompt, sampling_params, kind, priority, how, lora)
        pump = Pump(self._background, self._client, put)
        pump.start(request)
        return pump

    def get_tokenizer(self, *, hf: bool = False) -> Any:
        """The engine's tokenizer (frontend/text/tokenizer.py:Tokenizer), or with `hf` transformers', if installed.

        Raises InvalidRequestError when the engine runs without one, or transformers has none for the model.
        """
        if self._client.tokenizer is None:
            raise InvalidRequestError("this engine runs without a tokenizer (its option skip_tokenizer_init)")
        return tokenizer_of_engine(self.describe_engine().options, self.engine.model) if hf else self._client.tokenizer

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return tasks_of(self.engine)

    @property
    def llm_engine(self) -> LLMEngine:
        """An LLMEngine over this LLM, to submit requests one by one and to read `model_config` and the like."""
        from headrace.frontend.vllm.llm_engine import LLMEngine

        if self._engine is None:
            self._engine = LLMEngine(self)
        return self._engine

    @property
    def model_config(self) -> ModelConfig:
        return engine_config(self.engine).model_config

    def start_stat_loggers(self, loggers: StatLoggers) -> None:
        """Starts loggers of the engine's load, which run in the client's thread. May be called once.

        Raises InvalidRequestError for several engines.
        """
        loggers.check_number(len(self._client.engines))
        self._stat_loggers = loggers
        self._background.run(loggers.start(self._client, engine_config(self.engine)))

    def do_log_stats(self) -> None:
        """Logs throughput, requests, cache use and hit rate since the last time, as a server does every 10 s."""
        super().do_log_stats()
        self._background.run(self._stat_loggers.log())

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses when none are given: the defaults, with the fields that the model's
        generation config sets."""
        return default_params(self._client.welcome)

    @property
    def engine(self) -> Welcome:
        """The engine's description of itself: model, limits, start-up times."""
        return self._client.welcome

    def __repr__(self) -> str:
        welcome = self._client.welcome
        state = "" if self._close.alive else ", closed"
        return f"LLM(model={welcome.model!r}, dtype={welcome.dtype!r}, max_model_len={welcome.max_model_len}{state})"

    def shutdown(self) -> None:
        """`close`, under vLLM's name."""
        self.close()

    def close(self) -> None:
        """Aborts running requests, and stops the engine if this object started it. May be called again."""
        if os.getpid() == self._process_id:
            if self._close.alive and self._stat_loggers.loggers:
                self._background.run(self._stat_loggers.stop())
            self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self,
        request_id: str | None,
        prompt: Any,
        sampling_params: SamplingParams | None,
        kind: RequestOutputKind,
        priority: int,
        how: Tokenization = DEFAULT_TOKENIZATION,
        lora: LoRARequest | None = None,
    ) -> CheckedRequest:
        """A request with one prompt and this output kind, of the next id for None."""
        self._check_usable()
        (parsed,) = self._tokenized([parse_single_prompt(prompt)], how)
        self._use_loras([parsed], lora)
        (params,) = params_for(sampling_params, self._client.welcome, 1, kind)
        names = self._request_ids if request_id is None else None
        name = request_id if names is None else next(names)
        return self._traced(check(name, parsed, params, self._client, priority, other_names=names))

    def _tokenized(self, prompts: list[Prompt], how: Tokenization = DEFAULT_TOKENIZATION) -> list[Prompt]:
        if self._client.may_wait:
            self._background.run(self._client.until_usable())
        tokenize(prompts, self._client, how)
        return prompts

    def take(self, items: queue.SimpleQueue[T]) -> T:
        """Waits for the next item that the client's thread puts. Raises HeadraceError in that thread, and once this
        object is closed."""
        return self._background.take(items)

    def _check_usable(self) -> None:
        self._background.check_may_wait()
        if not self._close.alive:
            raise HeadraceError("this LLM is closed")


def connect(
    address: str, timeout_s: float = CONNECT_TIMEOUT_S, *, keys: str | None = None, reconnect: bool = False
) -> LLM:
    """Attaches to the engine-core that listens at `address`; see LLM.connect."""
    return LLM.connect(address, timeout_s, keys=keys, reconnect=reconnect)


def _shut_down(process_id: int, background: BackgroundLoop, client: EnginePool, tracer: Tracer | None) -> None:
    if os.getpid() != process_id:
        return  # a forked copy: it has no such thread, and the engine belongs to the parent
    if background.is_current_thread:  # the LLM was collected in the background thread, which cannot wait for itself
        threading.Thread(
            target=_shut_down, args=(process_id, background, client, tracer), name="headrace-close"
        ).start()
        return
    with contextlib.suppress(Exception):
        background.run(client.leave())
    background.stop()
    if tracer is not None:
        tracer.close()
    renderer().leave()
    client.stop(STOP_DEADLINE_S)
