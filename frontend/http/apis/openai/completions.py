"""POST /v1/completions: continues prompts, whole or as stream events."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.answer import (
    TEXT,
    AnswerContext,
    TextAnswer,
    TextEvent,
    encode,
    encoded,
    event,
    prompt_logprobs_are_complete,
    text_event,
    usage_of,
    usage_so_far,
)
from headrace.frontend.http.apis.openai.bodies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    TextOffsets,
    Usage,
    completion_logprobs,
    prompt_logprobs,
)
from headrace.frontend.http.apis.openai.chat import ChatParts
from headrace.frontend.http.apis.openai.parameters import check_outputs, sampling_params, thinking_budget
from headrace.frontend.http.apis.openai.prompts import cache_salt, check_prompt, most_prompt_tokens, tokenize_texts
from headrace.frontend.http.apis.openai.requests import NO_PROMPT, CompletionRequest, affinity_of
from headrace.frontend.http.apis.openai.selection import (
    check_selection,
    drop_needless_outputs,
    outputs_of,
    selection_of,
    width_of,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import adapters_of
from headrace.frontend.http.server.errors import as_api_error, bad_field
from headrace.frontend.http.server.generation import PreparedRequest, id_of_prompt
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.embeds import decoded, placed
from headrace.frontend.request.outputs import CompletionOutput, LogprobsOfPosition
from headrace.frontend.request.parameters.structured_outputs import field_of_body, from_body
from headrace.frontend.request.prompts import Prompt, packed, truncate
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

DEFAULT_MAX_TOKENS = 16
_OBJECT = "text_completion"


def prepare_completion(
    request: CompletionRequest,
    engine: Engine,
    id: str,
    parts: ChatParts,
    tenant: str,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    client, options = engine.connected, parts.options
    welcome = client.welcome
    drop_needless_outputs(request, welcome)
    check_selection(request, options.max_n)
    only_prompt = bool(request.echo) and request.max_tokens == 0
    asked = None if only_prompt else request.max_tokens
    prompts = _embedded(request, welcome)
    if not prompts or request.prompt:  # clients that must give a prompt give an empty one
        prompts += _prompts(request, client.tokenizer, options, most_prompt_tokens(request, welcome))
    if len(prompts) > options.max_prompts:
        raise bad_field("prompt", f"{len(prompts)} prompts; this server takes at most {options.max_prompts} at once")
    salt, adapters = cache_salt(request, tenant), adapters_of(engine, request.model, request.lora)
    reasoning = None
    if request.thinking_budget is not None or getattr(request, "thinking_token_budget", None) is not None:
        reasoning = parts.formats.named_reasoning
    for prompt in prompts:
        prompt.cache_salt, prompt.reasoning, prompt.adapters = salt, reasoning, adapters
    # If generation_config or override_generation_config sets it, sampling_params applies that default.
    if "max_tokens" in welcome.generation_defaults:
        default_max_tokens = None
    num_outputs, width = outputs_of(request), width_of(request)
    # best_of ranks outputs by the log-probabilities of their tokens.
    ranks = width > num_outputs and not getattr(request, "logprob_token_ids", None)
    logprobs = 0 if request.logprobs is None and ranks else request.logprobs
    echoed = request.logprobs if request.echo else None
    params = sampling_params(
        request,
        welcome,
        options,
        max_tokens=1 if only_prompt else default_max_tokens if asked is None else asked,
        logprobs=logprobs,
        n=1 if request.use_beam_search else width,
        prompt_logprobs=echoed if request.prompt_logprobs is None else request.prompt_logprobs,
        structured_outputs=from_body(request),
        thinking_token_budget=thinking_budget(request, prompts[0], welcome),
    )
    form_field = field_of_body(request)
    selection = selection_of(request, params, welcome, form_field)
    check_outputs(len(prompts), num_outputs if request.use_beam_search else width, params)
    requests = list[CheckedRequest]()
    for index, prompt in enumerate(prompts):
        name = id_of_prompt(id, index, len(prompts))
        if truncate(prompt, params, welcome):
            prompt.text = None
        try:
            requests.append(
                check_prompt(name, prompt, params, client, "prompt", priority=request.priority, max_tokens=asked)
            )
        except InvalidRequestError as error:
            raise as_api_error(error, index, len(prompts)) from error
        if request.echo and prompt.text is None and client.tokenizer is not None:
            prompt.text = client.tokenizer.decode(prompt.token_ids or [])
    return PreparedRequest(
        engine,
        id,
        requests,
        CompletionAnswer(AnswerContext(request, id, engine, options), num_outputs, only_prompt=only_prompt),
        is_streamed=bool(request.stream),
        affinity=affinity_of(request),
        form_field=form_field,
        selection=selection,
    )


def _embedded(request: CompletionRequest, welcome: Welcome) -> list[Prompt]:
    """The prompts of prompt_embeds, which come before those of `prompt`. Raises ApiError and InvalidRequestError."""
    given, request.prompt_embeds = request.prompt_embeds, None  # frees it
    if not given:
        return []
    if request.echo:
        raise bad_field("echo", "Echo is unsupported with prompt embeds.")
    if request.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "prompt_logprobs is not compatible with prompt embeds.")
    files = [given] if isinstance(given, str) else given
    prompts = []
    for index, file in enumerate(files):
        try:
            token_ids, inputs = placed(decoded(file, welcome), None, None)
        except InvalidRequestError as error:
            raise bad_field("prompt_embeds" if len(files) == 1 else f"prompt_embeds[{index}]", str(error)) from None
        prompts.append(Prompt(token_ids=token_ids, inputs=inputs))
    return prompts


def _prompts(
    request: CompletionRequest, tokenizer: Tokenizer | None, options: ServeOptions, max_model_len: int
) -> list[Prompt]:
    given = "" if request.prompt is None else request.prompt
    request.prompt = ""  # frees it: it may be large, and is not read again
    if isinstance(given, str):
        items: list[str | list[int]] = [given]
    elif not given:
        raise bad_field("prompt", f"prompt is an empty list: give a text, token ids, or a list of either. {NO_PROMPT}")
    elif all(isinstance(each, int) for each in given):
        items = [given]  # type: ignore[list-item]
    else:
        items = given  # type: ignore[assignment]
        for index, item in enumerate(items):
            if not isinstance(item, type(items[0])) or isinstance(item, int):
                raise bad_field(f"prompt[{index}]", "a list of prompts holds either texts or lists of token ids")
    if len(items) > options.max_prompts:
        raise bad_field("prompt", f"{len(items)} prompts; this server takes at most {options.max_prompts} at once")
    if isinstance(items[0], str):
        texts: list[str] = items  # type: ignore[assignment]
        special = request.add_special_tokens is not False
        encoded = tokenize_texts(texts, tokenizer, special=special, max_tokens=max_model_len, param="prompt")
        return [Prompt(text=text, token_ids=ids) for text, ids in zip(texts, encoded, strict=True)]
    items.reverse()
    # The decoder accepted only integers. Lists are freed one by one: freeing all at once would block other threads.
    return [Prompt(token_ids=packed(items.pop())) for _ in range(len(items))]  # type: ignore[arg-type]


class _TextProgress:
    """The state of one output's stream: what has been sent so far."""

    __slots__ = ("began", "index", "num_tokens", "offsets", "text_event")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text_event: TextEvent | None = None
        self.began = False
        self.num_tokens = 0
        self.offsets: TextOffsets | None = None


class CompletionAnswer(TextAnswer):
    """Writes the response: whole, or as the events of a stream."""

    def __init__(self, context: AnswerContext, num_outputs: int, *, only_prompt: bool) -> None:
        """num_outputs: returned for each prompt. only_prompt: the prompt is echoed, and nothing is generated."""
        super().__init__(context)
        request: CompletionRequest = context.request
        self._num_outputs, self._only_prompt = num_outputs, only_prompt
        self._echo = bool(request.echo)
        self._choices: dict[SequenceState, _TextProgress] = {}
        self._echoed: dict[RequestStream, tuple[CompletionLogprobs, TextOffsets]] = {}
        # Only text changes from one event to the next.
        self._is_plain = request.logprobs is None and not (self.continuous_usage or self.return_token_ids)
        self._tells_logprobs = request.logprobs is not None
        self._waits_for_prompt = self._echo or self.asks_prompt_logprobs

    def attach(self, streams: Sequence[RequestStream]) -> None:
        super().attach(streams)
        for position, stream in enumerate(streams):
            for sequence in stream.sequences:
                self._choices[sequence] = _TextProgress(position * self._num_outputs + sequence.index)

    def whole(self) -> list[bytes]:
        choices = []
        for stream in self.streams:
            for sequence in stream.sequences:
                output = sequence.read(delta=False, tokenizer=stream.tokenizer)
                choices.append(self._choice_of(stream, self._choices[sequence], output))
        choices.sort(key=lambda choice: choice.index)
        for choice in choices:
            choice.name_all()
        usage, times = self._usage(), self.times()
        return encoded(CompletionResponse(self.id, _OBJECT, self.created, self.model, choices, usage, times))

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        choice = self._choices[sequence]
        if not choice.began and self._waits_for_prompt and not prompt_logprobs_are_complete(stream):
            return b""
        if self._is_plain and sequence.finish_reason is None and (choice.began or not self._waits_for_prompt):
            if choice.text_event is None:
                plain = CompletionChoice(index=choice.index, text=TEXT)
                choice.text_event = text_event(self._chunk(plain))
            return encode(sequence.read_text()).join(choice.text_event)
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        told = self._choice_of(stream, choice, output)
        choice.num_tokens += len(output.token_ids)
        usage = usage_so_far(stream, choice.num_tokens) if self.continuous_usage else None
        return event(self._chunk(told, usage))

    def end(self) -> bytes:
        if not self.include_usage:
            return self.DONE
        usage, times = self._usage(), self.times(UNSET)
        last = CompletionResponse(self.id, _OBJECT, self.created, self.model, [], usage, times)
        return event(last) + self.DONE

    def _usage(self) -> Usage:
        usage = usage_of(self.streams)
        if self._only_prompt:
            usage.total_tokens -= usage.completion_tokens
            usage.completion_tokens = 0
        return usage

    def _chunk(self, choice: CompletionChoice, usage: Usage | None = None) -> CompletionResponse:
        return CompletionResponse(self.id, _OBJECT, self.created, self.model, [choice], usage or self.no_usage())

    def _echoed_logprobs(
        self, stream: RequestStream, token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition | None]
    ) -> tuple[CompletionLogprobs, TextOffsets]:
        """A prompt's log-probabilities and its offsets, computed once for all its outputs, since it may be long."""
        if stream not in self._echoed:
            offsets = TextOffsets(self.spell)
            self._echoed[stream] = completion_logprobs(token_ids, positions, self.spell, offsets), offsets
        return self._echoed[stream]

    def _choice_of(self, stream: RequestStream, choice: _TextProgress, output: CompletionOutput) -> CompletionChoice:
        """The choice of an output, or of its new part; the first one also has the prompt's fields."""
        is_first, choice.began = not choice.began, True
        prompt_ids = stream.prompt.token_ids or []
        text, token_ids, positions = output.text, output.token_ids, output.logprobs
        if self._only_prompt:
            text, token_ids, positions = "", [], None if positions is None else []
        logprobs: CompletionLogprobs | None = None
        if self._tells_logprobs:
            echoed: CompletionLogprobs | None = None
            before: TextOffsets | None = None
            if is_first and self._echo and stream.prompt_logprobs is not None:
                echoed, before = self._echoed_logprobs(stream, prompt_ids, stream.prompt_logprobs)
            if choice.offsets is None:
                tokenizer = stream.tokenizer if stream.params.skip_special_tokens else None
                without = frozenset() if tokenizer is None else tokenizer.special_ids
                choice.offsets = TextOffsets(self.spell, before, without)
            logprobs = completion_logprobs(token_ids, list(positions or []), self.spell, choice.offsets)
            logprobs = logprobs if echoed is None else echoed.followed_by(logprobs)
        if is_first and self._echo:
            text = (stream.prompt.text or "") + text
        result = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self._only_prompt and output.finish_reason else output.finish_reason,
            stop_reason=None if self._only_prompt else output.stop_reason,
        )
        if self.return_token_ids:
            result.prompt_token_ids = list(prompt_ids) if is_first else UNSET
            result.token_ids = token_ids
        if is_first and self.asks_prompt_logprobs and stream.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(stream.prompt_logprobs)
        return result
