"""POST /v1/chat/completions: a conversation in, its next message out, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.api.outputs import CompletionOutput
from headrace.frontend.api.prompts import Prompt
from headrace.frontend.client.request import RequestStream, SequenceState
from headrace.frontend.http.engines import Engine
from headrace.frontend.http.errors import bad_field
from headrace.frontend.http.generation import Job, PreparedRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.prompts import (
    ChatPrompts,
    cache_salt,
    check_length,
    check_outputs,
    sampling_params,
    tokenize_texts,
)
from headrace.frontend.http.requests import ChatCompletionRequest
from headrace.frontend.http.responses import (
    Answer,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    Delta,
    PromptLogprobs,
    TextEvent,
    Usage,
    chat_logprobs,
    event,
    prompt_is_told,
    prompt_logprobs,
    usage_of,
    usage_so_far,
)

_WHOLE, _CHUNK = "chat.completion", "chat.completion.chunk"


def prepare_chat(
    request: ChatCompletionRequest,
    engine: Engine,
    options: ServeOptions,
    prompts: ChatPrompts,
    name: str,
    tenant: str,
) -> PreparedRequest:
    """What to submit and how to answer. Raises ApiError and InvalidRequestError."""
    assert engine.client is not None
    client = engine.client
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise bad_field("top_logprobs", f"top_logprobs is {request.top_logprobs}; it must be at least 0")
    # max_tokens is the retired name, which clients may send beside the new one.
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(
        request,
        client.welcome,
        options,
        max_tokens=asked,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    check_outputs(1, params)
    text = prompts.render(
        request,
        request.messages,
        client.tokenizer,
        tool_choice=request.tool_choice,
        enable_thinking=request.enable_thinking,
        documents=request.documents,
    )
    # The template writes the special tokens itself.
    (token_ids,) = tokenize_texts(
        [text],
        client.tokenizer,
        special=bool(request.add_special_tokens),
        max_tokens=client.welcome.max_model_len,
        param="messages",
    )
    prompt = Prompt(text=text, token_ids=token_ids, cache_salt=cache_salt(request, tenant))
    check_length(prompt, asked, client.welcome, "messages")
    id = f"chatcmpl-{name}"
    answer = Answer(request, id, request.model or engine.names[0], client.tokenizer)
    return PreparedRequest(
        engine=engine,
        jobs=[Job(id, prompt, params, request.priority or 0)],
        answer=ChatAnswer(request, answer, options.response_role),
        streams=bool(request.stream),
    )


class _Choice:
    """What is told of one output so far."""

    __slots__ = ("began", "num_tokens", "text_event")

    def __init__(self, text_event: TextEvent) -> None:
        self.text_event = text_event
        self.began = False
        self.num_tokens = 0


class ChatAnswer:
    """Both forms of the response: `whole`, and the events of a stream (see `Chunks`)."""

    def __init__(self, request: ChatCompletionRequest, answer: Answer, role: str) -> None:
        self._request, self._answer, self._role = request, answer, role
        self._choices: dict[SequenceState, _Choice] = {}
        self._streams: Sequence[RequestStream] = ()
        self._is_prompt_told = False
        # Nothing but text changes from one event to the next.
        self._is_plain = not (request.logprobs or answer.continuous_usage or answer.return_token_ids)

    def attach(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        for stream in streams:
            for sequence in stream.sequences:
                plain = ChatChunkChoice(index=sequence.index, delta=Delta(content=TextEvent.PLACE))
                self._choices[sequence] = _Choice(TextEvent(self._chunk([plain])))

    def whole(self) -> bytes:
        """The response, once the stream has ended."""
        (stream,) = self._streams
        answer = self._answer
        outputs = [sequence.read(delta=False, tokenizer=stream.tokenizer) for sequence in stream.sequences]
        return msgspec.json.encode(
            ChatResponse(
                answer.id,
                _WHOLE,
                answer.created,
                answer.model,
                [self._choice_of(output) for output in outputs],
                usage_of(self._streams),
                prompt_logprobs=self._prompt_logprobs(stream),
                prompt_token_ids=self._prompt_token_ids(stream),
            )
        )

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        choice = self._choices[sequence]
        first = b""
        if not choice.began:
            if self._request.prompt_logprobs is not None and not prompt_is_told(stream):
                return b""
            choice.began = True
            first = self._first(stream, sequence)
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        if self._is_plain and output.finish_reason is None:
            return first + choice.text_event.of(output.text)
        choice.num_tokens += len(output.token_ids)
        told = ChatChunkChoice(
            index=output.index,
            delta=Delta(content=output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._answer.return_token_ids else UNSET,
        )
        usage = usage_so_far(stream, choice.num_tokens) if self._answer.continuous_usage else None
        return first + event(self._chunk([told], usage))

    def end(self) -> bytes:
        return event(self._chunk([], usage_of(self._streams))) if self._answer.include_usage else b""

    def _first(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        """An output's first event names its role; the very first also tells of the prompt."""
        role = ChatChunkChoice(index=sequence.index, delta=Delta(role=self._role, content=""))
        chunk = self._chunk([role], usage_so_far(stream, 0) if self._answer.continuous_usage else None)
        if not self._is_prompt_told:
            self._is_prompt_told = True
            chunk.prompt_token_ids = self._prompt_token_ids(stream)
            chunk.prompt_logprobs = self._prompt_logprobs(stream)
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        answer = self._answer
        return ChatChunk(answer.id, _CHUNK, answer.created, answer.model, choices, usage or answer.no_usage())

    def _choice_of(self, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(role=self._role, content=output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._answer.return_token_ids else UNSET,
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs, self._answer.spell, self._request.top_logprobs or 0)

    def _prompt_token_ids(self, stream: RequestStream) -> list[int] | UnsetType:
        return (stream.prompt.token_ids or []) if self._answer.return_token_ids else UNSET

    def _prompt_logprobs(self, stream: RequestStream) -> PromptLogprobs | UnsetType:
        asked: Any = self._request.prompt_logprobs
        return UNSET if asked is None or stream.prompt_logprobs is None else prompt_logprobs(stream.prompt_logprobs)
