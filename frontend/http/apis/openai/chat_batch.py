"""POST /v1/chat/completions/batch: several conversations in one request; the response has one choice for each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.answer import encoded
from headrace.frontend.http.apis.openai.bodies import ChatResponse, CompletionTokensDetails, PromptTokensDetails, Usage
from headrace.frontend.http.apis.openai.chat import ChatAnswer, ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.parameters import check_outputs
from headrace.frontend.http.apis.openai.requests import ChatBatchRequest, ChatCompletionRequest
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.generation import Answer, PreparedRequest


def prepare_chat_batch(
    request: ChatBatchRequest, engine: Engine, id: str, parts: ChatParts, tenant: str
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    _check(request, parts.options.max_prompts)
    fields = {each: getattr(request, each) for each in ChatCompletionRequest.__struct_fields__}
    each_prepared = list[PreparedRequest]()
    for index, conversation in enumerate(request.messages):
        one = ChatCompletionRequest(**{**fields, "messages": conversation})
        try:
            prepared = prepare_chat(one, engine, f"{id}-{index}", parts, tenant)
        except ApiError as error:
            if (error.body.param or "").startswith("messages"):
                error.body.message = f"conversation {index}: {error.body.message}"
                error.body.param = f"messages[{index}]"
            raise
        if index == 0:
            (one_checked,) = prepared.requests
            check_outputs(len(request.messages), one_checked.params.n, one_checked.params)
        each_prepared.append(prepared)
    return PreparedRequest(
        engine,
        id,
        [request for each in each_prepared for request in each.requests],
        ChatBatchAnswer(id, [each.answer for each in each_prepared]),
        affinity=each_prepared[0].affinity,
        form_field=each_prepared[-1].form_field,
    )


def _check(request: ChatBatchRequest, most: int) -> None:
    if not request.messages:
        raise bad_field("messages", "messages is empty: give at least one conversation")
    if len(request.messages) > most:
        raise bad_field("messages", f"{len(request.messages)} conversations; this server takes at most {most} at once")
    for name in ("stream", "stream_options", "use_beam_search", "best_of", "prompt_logprobs", "return_prompt_text"):
        if getattr(request, name, None):
            raise bad_field(name, f"{name} is for one conversation: ask /v1/chat/completions", "unsupported_parameter")
    if request.n not in (None, 1):
        raise bad_field("n", f"n is {request.n}; each conversation has one choice here")


class ChatBatchAnswer(Answer):
    """Writes the response, which is never streamed."""

    def __init__(self, id: str, answers: Sequence[Answer]) -> None:
        self._id, self._answers = id, [each for each in answers if isinstance(each, ChatAnswer)]

    def attach(self, streams: Sequence[RequestStream]) -> None:
        for answer, stream in zip(self._answers, streams, strict=True):
            answer.attach([stream])

    def whole(self) -> list[bytes]:
        choices = []
        for index, answer in enumerate(self._answers):
            (choice,) = answer.choices()
            choices.append(msgspec.structs.replace(choice, index=index))
        first, usage = self._answers[0], _sum([answer.usage() for answer in self._answers])
        return encoded(ChatResponse(self._id, "chat.completion", first.created, first.model, choices, usage))


def _sum(usages: Sequence[Usage]) -> Usage:
    num_prompt = sum(each.prompt_tokens for each in usages)
    num_output = sum(each.completion_tokens for each in usages)
    cached = sum(each.prompt_tokens_details.cached_tokens for each in usages if each.prompt_tokens_details is not UNSET)
    total = Usage(num_prompt, num_prompt + num_output, num_output, PromptTokensDetails(cached))
    details = [each.completion_tokens_details for each in usages if each.completion_tokens_details is not UNSET]
    if details:
        thought = sum(each.reasoning_tokens for each in details if isinstance(each, CompletionTokensDetails))
        total.completion_tokens_details = CompletionTokensDetails(thought)
    return total
