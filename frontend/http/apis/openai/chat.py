"""POST /v1/chat/completions: answers a conversation with its next message, whole or as stream events."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

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
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionTokensDetails,
    Delta,
    FunctionDelta,
    PromptLogprobs,
    ToolCallDelta,
    Usage,
    chat_logprobs,
    prompt_logprobs,
)
from headrace.frontend.http.apis.openai.parameters import check_outputs, sampling_params, thinking_budget
from headrace.frontend.http.apis.openai.prompts import (
    ChatPrompts,
    cache_salt,
    check_prompt,
    count_text,
    most_prompt_tokens,
    template_variables,
    tokenize_texts,
)
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, affinity_of
from headrace.frontend.http.apis.openai.selection import check_selection, selection_of
from headrace.frontend.http.apis.openai.tool_choice import NO_STRICT_CALLS, check_schemas, tool_choice_of
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import adapters_of
from headrace.frontend.http.server.api import ApiState
from headrace.frontend.http.server.errors import bad_field, respelt
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.request.embedded_parts import check_placeholders, has_parts, splice, take_parts
from headrace.frontend.request.message import call_id, message_of, num_reasoning_tokens
from headrace.frontend.request.outputs import CompletionOutput
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.parameters.structured_outputs import (
    StructuredOutputsParams,
    field_of_body,
    from_body,
    schema_of_answer,
)
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.chat_template import RenderedChat, text_parts
from headrace.frontend.text.formats.declaration import ReasoningFormat
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.output_formats import NO_TOOLS, ONLY_TEXT, OutputFormats, ToolChoice
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

_SPELLINGS: Mapping[str, str] = types.MappingProxyType({"logprobs": "top_logprobs"})
_WHOLE, _CHUNK = "chat.completion", "chat.completion.chunk"


class ChatParts(ApiState):
    """The server-wide parts that chat requests need: options, templates, output formats."""

    def __init__(self, options: ServeOptions, template: str | None, *, trusts_requests: bool) -> None:
        """template: the option chat_template's, if set. Raises OptionError for invalid output formats."""
        self.options = options
        self.prompts = ChatPrompts(
            template,
            trusts_requests=trusts_requests,
            defaults=template_variables(options.default_chat_template_kwargs),
            content_format=options.chat_template_content_format,
        )
        self.formats = OutputFormats(
            options.tool_call_parser,
            options.reasoning_parser,
            enable_auto_tool_choice=options.enable_auto_tool_choice,
            plugins={
                "tool_parser_plugin": options.tool_parser_plugin,
                "reasoning_parser_plugin": options.reasoning_parser_plugin,
            },
        )

    @classmethod
    def create(cls, state: ServerState) -> ChatParts:
        options = state.options
        return cls(options, state.template, trusts_requests=options.trust_request_chat_template)


def _embedded(request: ChatCompletionRequest, welcome: Welcome) -> list[Tensor]:
    """Takes the parts that are embeddings out of the messages. Raises ApiError."""
    found: list[Tensor] = []
    for message in request.messages:
        if isinstance(message.content, list) and has_parts(message.content):
            break
    else:
        return found
    for index, message in enumerate(request.messages):
        try:
            check_placeholders(message.content)
            if has_parts(message.content):
                message.content = take_parts(message.content or (), welcome, found)
        except InvalidRequestError as error:
            raise bad_field(f"messages[{index}].content", str(error)) from None
    return found


def count_prompt(request: ChatCompletionRequest, engine: Engine, parts: ChatParts) -> int:
    """The number of tokens in the prompt, of any length. Raises ApiError and InvalidRequestError."""
    tokenizer = engine.connected.tokenizer
    prompt, _ = _rendered(request, tokenizer, parts)
    assert tokenizer is not None, "a conversation is rendered only with one"
    return count_text(prompt.text, tokenizer, special=bool(request.add_special_tokens))


def _rendered(
    request: ChatCompletionRequest, tokenizer: Tokenizer | None, parts: ChatParts
) -> tuple[RenderedChat, ToolChoice]:
    choice = NO_TOOLS
    if request.tools is not None or request.tool_choice is not None:
        choice = tool_choice_of(request.tools, request.tool_choice)
    if parts.options.tool_strict_level == "parameter":
        choice = choice._replace(always_strict=True)
    prompt = parts.prompts.render(
        request,
        request.messages,
        tokenizer,
        tools=choice.shown,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning_effort,
        verbosity=request.verbosity,
        documents=request.documents,
    )
    return prompt, choice


def prepare_chat(
    request: ChatCompletionRequest,
    engine: Engine,
    id: str,
    parts: ChatParts,
    tenant: str,
    make_answer: Callable[[AnswerContext], TextAnswer] | None = None,
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    options, client = parts.options, engine.connected
    welcome = client.welcome
    if request.top_logprobs and not request.logprobs:  # 0, vLLM's default, asks for nothing
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    if request.top_logprobs is not None and request.top_logprobs < -1:
        raise bad_field("top_logprobs", f"top_logprobs is {request.top_logprobs}; it must be at least 0, or -1 for all")
    if request.length_penalty is not None:
        check_selection(request, options.max_n)
    embeds = _embedded(request, welcome)
    rendered, choice = _rendered(request, client.tokenizer, parts)
    assert client.tokenizer is not None, "a conversation is rendered only with one"
    form = _form_of(request, rendered, choice, parts, client.tokenizer, welcome)
    salt = tenant if request.cache_salt is None else cache_salt(request, tenant)
    prompt = Prompt(text=rendered.text, cache_salt=salt, reasoning=form.reasoning)
    prompt.adapters = adapters_of(engine, request.model, request.lora)
    prompt.reasoning_has_form = form.is_grammar and bool(choice.forced)
    # max_tokens is the retired name, which clients may send beside the new one.
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    with _own_spellings(request):
        params = _params_of(request, asked, form, prompt, options, welcome)
    check_outputs(1, params.n, params)
    # Errors name the field that is the cause: tools for a bad schema, tool_choice for a form with beams.
    form_field = "structured_outputs"
    if params.structured_outputs is not None:
        form_field = "tools" if form.is_grammar and choice.shown else field_of_body(request)
    selection = None
    if request.use_beam_search:
        selection = selection_of(request, params, welcome, "tool_choice" if choice.forced else form_field)
    _tokenize(prompt, request, embeds, client.tokenizer, welcome)
    if not prompt.token_ids:
        raise bad_field("messages", "messages: the prompt is empty; there must be at least one token")
    with _own_spellings(request):
        checked = check_prompt(id, prompt, params, client, "messages", priority=request.priority, max_tokens=asked)
    return PreparedRequest(
        engine,
        id,
        [checked],
        (make_answer or ChatAnswer)(AnswerContext(request, id, engine, options, form.make_parser, choice.is_named)),
        is_streamed=bool(request.stream),
        affinity=affinity_of(request),
        form_field=form_field,
        selection=selection,
    )


@contextlib.contextmanager
def _own_spellings(request: ChatCompletionRequest) -> Iterator[None]:
    """Errors that are raised inside name SamplingParams' fields as the body does."""
    try:
        yield
    except InvalidRequestError as error:
        spellings = {} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        raise respelt(error, {**spellings, **_SPELLINGS}) from error


class _Form(NamedTuple):
    """The form of a chat's output."""

    make_parser: Callable[[], OutputParser] | None
    """Creates the parser of one output; None if it cannot contain reasoning or tool calls."""
    reasoning: ReasoningFormat | None
    structured_outputs: StructuredOutputsParams | None
    is_grammar: bool
    """Whether the constraint is that of tool calls, and not the request's own."""


def _form_of(
    request: ChatCompletionRequest,
    rendered: RenderedChat,
    choice: ToolChoice,
    parts: ChatParts,
    tokenizer: Tokenizer,
    welcome: Welcome,
) -> _Form:
    """Raises ApiError and InvalidRequestError."""
    own = from_body(request)
    formats = parts.formats.of(rendered, choice)
    if formats == ONLY_TEXT and not choice.shown:
        return _Form(None, None, own, is_grammar=False)
    formats = formats.as_written(rendered.text, tokenizer)
    # If the engine cannot tell when reasoning ends, the grammar has to include the reasoning.
    thinks_in_channels = formats.channels is not None and not welcome.grammars_hold_in_reasoning
    or_json = schema_of_answer(own) if (choice.shown or thinks_in_channels) and not choice.forced else None
    if choice.asks_for_strict and not choice.forced and not formats.can_hold_calls(tokenizer):
        raise bad_field("tools", NO_STRICT_CALLS)
    if choice.forced or ((choice.is_strict or or_json is not None) and formats.can_hold_calls(tokenizer)):
        check_schemas(choice)
    make_parser = formats.parser_factory(tokenizer, rendered, choice)
    several = request.parallel_tool_calls is not False
    grammar = formats.grammar(tokenizer, rendered, choice, several=several, or_json=or_json)
    if grammar is None:
        return _Form(make_parser, formats.reasoning, own, is_grammar=False)
    # A call that must come is no text, whose form a JSON schema is.
    is_for_text = bool(choice.forced) and schema_of_answer(own) is not None
    if own is not None and or_json is None and not is_for_text:
        raise bad_field(
            "tool_choice", "an answer that calls tools can have no other form besides, but that of a JSON schema"
        )
    return _Form(make_parser, formats.reasoning, StructuredOutputsParams(grammar=grammar), is_grammar=True)


def _params_of(
    request: ChatCompletionRequest,
    asked: int | None,
    form: _Form,
    prompt: Prompt,
    options: ServeOptions,
    welcome: Welcome,
) -> SamplingParams:
    """asked: the number of tokens that the request asks for. Raises ApiError and InvalidRequestError."""
    chosen: dict[str, Any] = {"n": 1} if request.use_beam_search else {}
    if form.make_parser is not None:
        # Markers may be special tokens; the parser drops all other special tokens.
        chosen["skip_special_tokens"] = False
    return sampling_params(
        request,
        welcome,
        options,
        max_tokens=asked,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_outputs=form.structured_outputs,
        thinking_token_budget=thinking_budget(request, prompt, welcome),
        **chosen,
    )


def _tokenize(
    prompt: Prompt, request: ChatCompletionRequest, embeds: list[Tensor], tokenizer: Tokenizer, welcome: Welcome
) -> None:
    """Sets the prompt's tokens, and its inputs where the conversation has embeddings. Raises ApiError."""
    encode = functools.partial(
        tokenize_texts,
        tokenizer=tokenizer,
        special=bool(request.add_special_tokens),  # mostly false: the template writes them itself
        max_tokens=most_prompt_tokens(request, welcome),
        param="messages",
    )
    text = prompt.text or ""
    if embeds:
        prompt.token_ids, prompt.inputs = splice(text, embeds, tokenizer, lambda part: encode([part])[0])
    else:
        (prompt.token_ids,) = encode([text])


class _ChatProgress:
    """The state of one output's stream: what has been sent, and encoded events to continue with."""

    __slots__ = (
        "arguments_event",
        "began",
        "call",
        "going_on",
        "num_tokens",
        "parser",
        "reasoning_event",
        "text_event",
        "until",
    )

    def __init__(self, text_event: TextEvent, parser: OutputParser | None) -> None:
        self.text_event, self.parser = text_event, parser
        self.reasoning_event: TextEvent | None = None
        self.arguments_event: TextEvent | None = None
        """The event for further arguments of the tool call `call`."""
        self.call = -1
        self.going_on = text_event
        """The event for more text of the kind that was sent last."""
        self.until: Callable[[str], object] | None = None
        """Text is sent as `going_on` while this finds nothing in it; None: every text goes through the parser."""
        self.began = False
        self.num_tokens = 0


class ChatAnswer(TextAnswer):
    """Writes the response: whole, or as the events of a stream."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        request: ChatCompletionRequest = context.request
        self._role = context.options.response_role
        self._echoed = _echoed(request, self._role) if request.echo else ""
        self._choices: dict[SequenceState, _ChatProgress] = {}
        self._is_prompt_told = False
        self._thoughts: dict[int, list[str]] = {}
        """The reasoning of each output, by its index."""
        # Only text changes from one event to the next.
        self._is_plain = not (request.logprobs or self.continuous_usage or self.return_token_ids)
        self._num_top: int | None = request.top_logprobs or 0
        if self._num_top == -1 or getattr(request, "logprob_token_ids", None):
            self._num_top = None
        self._calls_once = request.parallel_tool_calls is False
        self._returns_prompt_text = bool(request.return_prompt_text)

    def whole(self) -> list[bytes]:
        (stream,) = self.streams
        return encoded(
            ChatResponse(
                self.id,
                _WHOLE,
                self.created,
                self.model,
                self.choices(),
                self.usage(),
                prompt_logprobs=self._prompt_logprobs(stream),
                prompt_token_ids=self._prompt_token_ids(stream),
                prompt_text=self._prompt_text(stream),
                metrics=self.times(),
            )
        )

    def choices(self) -> list[ChatChoice]:
        """The choices, once the stream has ended."""
        (stream,) = self.streams
        outputs = [sequence.read(delta=False, tokenizer=stream.tokenizer) for sequence in stream.sequences]
        return [self._choice_of(output) for output in outputs]

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        choice = self._choices.get(sequence)
        if choice is None:
            plain = ChatChunkChoice(index=sequence.index, delta=Delta(content=TEXT))
            choice = self._choices[sequence] = _ChatProgress(text_event(self._chunk([plain])), self.new_parser())
        first = b""
        if not choice.began:
            if self.asks_prompt_logprobs and not prompt_logprobs_are_complete(stream):
                return b""
            choice.began = True
            first = self._first(stream, sequence)
        parser = choice.parser
        if self._is_plain and sequence.finish_reason is None:
            text = sequence.read_text()
            if parser is None:
                return first + encode(text).join(choice.text_event)
            if (until := choice.until) is not None and text and not until(text):
                return first + encode(text).join(choice.going_on)
            if (said := parser.go_on(text)) is not None:
                return first + self._went_on(choice, parser, said, sequence.index)
            choice.until = None
            events = self._kept(parser.feed(text), sequence.index)
            return first + b"".join([self._event_of(choice, each, sequence.index) for each in events])
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        finish_reason = output.finish_reason
        deltas = [Delta(content=output.text)]
        if parser is not None:
            events = parser.read(output.text, finish_reason, output.stop_reason)
            deltas = [_delta_of(each) for each in self._kept(events, output.index)] or [Delta()]
            finish_reason = self._finish_reason(parser, output)
        choice.num_tokens += len(output.token_ids)
        told = ChatChunkChoice(
            index=output.index,
            delta=deltas.pop(),
            logprobs=None if output.logprobs is None else self._logprobs(output),
            finish_reason=finish_reason,
            stop_reason=UNSET if finish_reason is None else output.stop_reason,
            token_ids=output.token_ids if self.return_token_ids else UNSET,
        )
        usage = usage_so_far(stream, choice.num_tokens) if self.continuous_usage else None
        for each in deltas:
            first += event(self._chunk([ChatChunkChoice(index=output.index, delta=each)]))
        return first + event(self._chunk([told], usage))

    def _kept(self, events: list[AnswerPart], index: int) -> list[AnswerPart]:
        """Of an output's events those that the response has: the request may exclude reasoning, and further calls."""
        for each in events:
            if each.reasoning:
                self._thoughts.setdefault(index, []).append(each.reasoning)
        if not self.has_reasoning:
            events = [each for each in events if not each.reasoning]
        if self._calls_once:
            events = [each for each in events if not self._is_left_out(each.call)]
        return events

    def _is_left_out(self, call: int) -> bool:
        return call > 0 and self._calls_once

    def _went_on(self, choice: _ChatProgress, parser: OutputParser, said: str, index: int) -> bytes:
        """The event for a piece that is all content, all reasoning or all arguments."""
        if self._is_left_out(parser.call):
            return b""
        if parser.call >= 0 or not parser.is_thinking:
            is_content = parser.call < 0
            choice.going_on = choice.text_event if is_content else self._arguments_event(choice, parser.call, index)
            choice.until = parser.goes_on_until
            return encode(said).join(choice.going_on)
        self._thoughts.setdefault(index, []).append(said)
        if not self.has_reasoning:
            return b""
        if choice.reasoning_event is None:
            delta = Delta(reasoning=TEXT, reasoning_content=TEXT)
            choice.reasoning_event = text_event(self._chunk([ChatChunkChoice(index=index, delta=delta)]))
        return encode(said).join(choice.reasoning_event)

    def _finish_reason(self, parser: OutputParser, output: CompletionOutput) -> str | None:
        """As OpenAI's: tool_calls if there are calls, but stop if the request named the tool, or if a stop string cut
        the last call, which must not be carried out."""
        reason = output.finish_reason
        if reason != "stop" or not parser.num_calls or self.names_tool:
            return reason
        is_cut = parser.is_cut_by(output.stop_reason) and not self._is_left_out(parser.num_calls - 1)
        return reason if is_cut else "tool_calls"

    def _event_of(self, choice: _ChatProgress, told: AnswerPart, index: int) -> bytes:
        if told.content:
            return encode(told.content).join(choice.text_event)
        if told.call < 0 or told.name:
            return event(self._chunk([ChatChunkChoice(index=index, delta=_delta_of(told))]))
        return encode(told.arguments).join(self._arguments_event(choice, told.call, index))

    def _arguments_event(self, choice: _ChatProgress, call: int, index: int) -> TextEvent:
        if choice.arguments_event is None or choice.call != call:
            delta = _delta_of(AnswerPart(call=call, arguments=TEXT))
            choice.arguments_event = text_event(self._chunk([ChatChunkChoice(index=index, delta=delta)]))
            choice.call = call
        return choice.arguments_event

    def end(self) -> bytes:
        if not self.include_usage:
            return self.DONE
        last = self._chunk([], self.usage())
        last.metrics = self.times(UNSET)
        return event(last) + self.DONE

    def _first(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        """An output's first event, with its role; the response's first event also has the prompt's fields."""
        role = ChatChunkChoice(index=sequence.index, delta=Delta(role=self._role, content=""))
        chunk = self._chunk([role], usage_so_far(stream, 0) if self.continuous_usage else None)
        if not self._is_prompt_told:
            self._is_prompt_told = True
            if self.return_token_ids:
                chunk.prompt_token_ids = list(stream.prompt.token_ids or ())
            if self.asks_prompt_logprobs and (logprobs := self._prompt_logprobs(stream)) is not None:
                chunk.prompt_logprobs = logprobs
            if self._returns_prompt_text:
                chunk.prompt_text = self._prompt_text(stream)
        if not self._echoed:
            return event(chunk)
        echoed = ChatChunkChoice(index=sequence.index, delta=Delta(content=self._echoed))
        return event(chunk) + event(self._chunk([echoed]))

    def usage(self) -> Usage:
        usage = usage_of(self.streams)
        if self.make_parser is not None:
            most, tokenizer = usage.completion_tokens, self.tokenizer
            each = [num_reasoning_tokens(tokenizer, "".join(texts), most) for texts in self._thoughts.values()]
            usage.completion_tokens_details = CompletionTokensDetails(min(sum(each), most))
        return usage

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self.id, _CHUNK, self.created, self.model, choices, usage or self.no_usage())

    def _choice_of(self, output: CompletionOutput) -> ChatChoice:
        message, finish_reason = AssistantMessage(self._role, output.text), output.finish_reason
        parser = self.new_parser()
        if parser is not None:
            events = parser.read(output.text, output.finish_reason, output.stop_reason)
            message = _message_of(self._role, self._kept(events, output.index))
            finish_reason = self._finish_reason(parser, output)
        if self._echoed:
            message.content = self._echoed + (message.content or "")
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.return_token_ids else None,
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs, self.spell, self._num_top)

    def _prompt_token_ids(self, stream: RequestStream) -> list[int] | None:
        return list(stream.prompt.token_ids or ()) if self.return_token_ids else None

    def _prompt_text(self, stream: RequestStream) -> str | UnsetType | None:
        return stream.prompt.text if self._returns_prompt_text else UNSET

    def _prompt_logprobs(self, stream: RequestStream) -> PromptLogprobs | None:
        told = stream.prompt_logprobs if self.asks_prompt_logprobs else None
        return None if told is None else prompt_logprobs(told)


def _echoed(request: ChatCompletionRequest, role: str) -> str:
    """The last message's text, if the answer is to begin with it (echo)."""
    last = request.messages[-1]
    if last.role != role:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(text_parts(last.content or (), "messages"))


def _delta_of(told: AnswerPart) -> Delta:
    if told.reasoning:
        return Delta(reasoning=told.reasoning, reasoning_content=told.reasoning)
    if told.call < 0:
        return Delta(content=told.content)
    if not told.name:
        return Delta(tool_calls=[ToolCallDelta(told.call, FunctionDelta(arguments=told.arguments))])
    function = FunctionDelta(name=told.name, arguments=told.arguments)
    return Delta(tool_calls=[ToolCallDelta(told.call, function, id=call_id(told), type="function")])


def _message_of(role: str, events: Sequence[AnswerPart]) -> AssistantMessage:
    read = message_of(events)
    return AssistantMessage(
        role,
        read.content,
        tool_calls=read.tool_calls or UNSET,
        reasoning=read.reasoning or None,
        reasoning_content=read.reasoning or UNSET,
    )
