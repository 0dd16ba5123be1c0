"""Conversations in the place of texts, which become texts by the model's chat template, as vLLM takes them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import ChatPrompts
from headrace.frontend.http.apis.openai.requests import ChatMessage, ContinueFinal, Many, Template, TemplateVariables
from headrace.frontend.http.apis.pooling.pooled import Input, PooledFields, Side, SpecialTokens, Truncation
from headrace.frontend.http.server.errors import bad_field


class TextFields(PooledFields, kw_only=True):
    """The fields of requests whose texts are an input, or become one."""

    message_kind: ClassVar[type[msgspec.Struct]] = ChatMessage

    input: Input | None = None
    messages: Annotated[
        Many[ChatMessage | Many[ChatMessage]] | None,
        Meta(description="In the place of input: a conversation, or a list of conversations"),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Add the template's generation prompt; default: false")
    ] = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: Side = None
    add_special_tokens: SpecialTokens = None


def take_messages(request: TextFields, engine: Engine, prompts: ChatPrompts) -> None:
    """Puts the texts of a request's conversations in the place of its input. Special tokens are added to them only if
    it asks for that: the template writes them. Raises ApiError and InvalidRequestError."""
    if request.messages is None:
        if request.input is None:
            raise bad_field("input", "input is required, or messages", "missing_required_parameter")
        return
    if request.input is not None:
        raise bad_field("messages", "messages are given beside input: give one of them")
    if not request.messages:
        raise bad_field("messages", "messages is empty: give at least one")
    are_lists = {isinstance(each, list) for each in request.messages}
    if len(are_lists) > 1:
        raise bad_field("messages", "messages holds either messages or lists of them")
    request.add_generation_prompt = bool(request.add_generation_prompt)
    conversations: Any = request.messages if True in are_lists else [request.messages]
    tokenizer = engine.connected.tokenizer
    request.input = [prompts.render(request, each, tokenizer, tools=None).text for each in conversations]
    request.messages = None
    request.add_special_tokens = bool(request.add_special_tokens)
