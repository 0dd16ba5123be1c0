"""Converts a request's fields to prompts, within the limits of the server and the model.

Conversations are rendered with the model's chat template, the server's or (if trusted) the request's.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.frontend.http.apis.openai.requests import ChatMessage, GenerationRequest
from headrace.frontend.http.server.errors import ContextLengthError, bad_field
from headrace.frontend.http.server.tool_results import readable
from headrace.frontend.request.checks import CheckedRequest, TooLongError, check
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import ModelFacts, Prompt, packed
from headrace.frontend.text.chat_template import (
    ContentFormat,
    Message,
    RenderedChat,
    complete_message,
    render_chat,
    text_parts,
)
from headrace.frontend.text.instructions import may_move, place_instructions
from headrace.frontend.text.template_renderer import one_limit
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError, OptionError
from headrace.ipc.messages import Welcome

MOST_TRUNCATED = 8
"""Times max_model_len: the longest text that is tokenised for truncate_prompt_tokens to cut."""
LONGEST_SALT = 2048
_TOKENIZE_AT_ONCE_CHARACTERS = 1 << 17
"""Most text per call of the tokenizer library: freeing its result holds the GIL."""
_CUT_SLACK_CHARACTERS = 256
"""Characters on both sides of a cut in a text whose tokens show whether it may be cut there."""
_MOST_CUTS_TRIED = 64
_PROBED_CHARACTERS_PER_TOKEN = 16
_PROBE_SLACK_TOKENS = 16
"""By how much cutting a text may increase its number of tokens."""


def tokenize_texts(
    texts: Sequence[str], tokenizer: Tokenizer | None, *, special: bool, max_tokens: int, param: str
) -> list[Sequence[int]]:
    """Token ids of texts. Raises ApiError for invalid Unicode, or a text that must be longer than `max_tokens`.

    Tokenising takes a hundred times a text's own memory, so a text that cannot fit is refused before.
    """
    if tokenizer is None:
        raise bad_field("prompt", "this engine runs without a tokenizer: give token ids instead of text")
    token_ids: list[Sequence[int]] = []
    batch: list[str] = []
    num_characters = 0  # of the batch
    for text in texts:
        if len(text) > max_tokens:
            check_text_length(text, tokenizer, max_tokens, param)
        else:
            check_unicode(text)
        batch.append(text)
        num_characters += len(text)
        if num_characters > _TOKENIZE_AT_ONCE_CHARACTERS:
            token_ids += map(packed, tokenizer.encode_batch(batch, special))
            batch, num_characters = [], 0
    if len(texts) == 1 and batch:
        return [tokenizer.encode(batch[0], special)]
    return [*token_ids, *map(packed, tokenizer.encode_batch(batch, special))]


def count_text(text: str, tokenizer: Tokenizer, *, special: bool) -> int:
    """The number of a text's tokens, whatever its length. A long text is tokenised in pieces, since tokenising takes a
    hundred times a text's own memory: it is cut where its tokens are those of both sides. If there is no such place
    nearby, as in one endless word, the count may be one too high for that piece. Raises ApiError."""
    check_unicode(text)
    count, start = len(tokenizer.encode("", special)), 0
    for cut in range(_TOKENIZE_AT_ONCE_CHARACTERS, len(text) - _CUT_SLACK_CHARACTERS, _TOKENIZE_AT_ONCE_CHARACTERS):
        end = next((at for at in range(cut, cut + _MOST_CUTS_TRIED) if _may_be_cut(text, at, tokenizer)), cut)
        count += tokenizer.count_tokens(text[start:end])
        start = end
    return count + tokenizer.count_tokens(text[start:])


def _may_be_cut(text: str, at: int, tokenizer: Tokenizer) -> bool:
    left, right = text[at - _CUT_SLACK_CHARACTERS : at], text[at : at + _CUT_SLACK_CHARACTERS]
    whole, *sides = tokenizer.encode_batch([left + right, left, right], add_special_tokens=False)
    return whole == sides[0] + sides[1]


def check_unicode(text: str) -> None:
    """Raises ApiError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_field("prompt", f"the prompt is not valid Unicode text: {error}") from error


def check_text_length(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """Raises ApiError for invalid Unicode, and for a text that must have more than max_tokens."""
    if len(text) > max_tokens and len(text) > max_tokens * tokenizer.longest_token:
        raise ContextLengthError(
            f"your {param} of {len(text)} characters cannot fit, as no token stands for more than "
            f"{tokenizer.longest_token}",
            param=param,
            num_prompt=-(-len(text) // tokenizer.longest_token),
            limit=max_tokens,
        )
    check_unicode(text)
    if len(text) > max_tokens * _PROBED_CHARACTERS_PER_TOKEN:
        # For most texts that are too long, the beginning proves it, for a fraction of the memory.
        num_tokens = 0
        end = min(len(text), max_tokens * _PROBED_CHARACTERS_PER_TOKEN)
        for start in range(0, end, _TOKENIZE_AT_ONCE_CHARACTERS):
            part = text[start : start + _TOKENIZE_AT_ONCE_CHARACTERS]
            num_tokens += max(0, tokenizer.count_tokens(part) - _PROBE_SLACK_TOKENS)
            if num_tokens > max_tokens:
                what = f"your {param} resulted in more than {num_tokens} tokens"
                raise ContextLengthError(what, param=param, num_prompt=num_tokens, limit=max_tokens)


def most_prompt_tokens(request: GenerationRequest, welcome: Welcome) -> int:
    """Most tokens of a prompt's text; more than the model accepts if truncate_prompt_tokens cuts it."""
    return welcome.max_model_len * (1 if getattr(request, "truncate_prompt_tokens", None) is None else MOST_TRUNCATED)


def check_prompt(
    name: str,
    prompt: Prompt,
    params: SamplingParams | PoolingParams,
    facts: ModelFacts,
    field: str,
    *,
    priority: int | None = None,
    max_tokens: int | None = None,
) -> CheckedRequest:
    """What the engine is asked for, under this name, of a tokenised prompt of the body's `field`. max_tokens: as the
    body has them; they must fit whole, as OpenAI has it. Raises ContextLengthError, InvalidRequestError."""
    try:
        return check(name, prompt, params, facts, priority or 0, min_room=max_tokens or 1)
    except TooLongError as error:
        num_prompt, limit = error.num_prompt, error.limit
        num_new = max_tokens or 0 if num_prompt < limit else 0
        what, remedy = f"your {field} resulted in {num_prompt} tokens", ""
        if isinstance(params, PoolingParams):
            remedy = ", or give truncate_prompt_tokens: -1"
        elif num_new:
            parts = f"({num_prompt} in the {field}, {num_new} in the completion)"
            what = f"you requested {num_prompt + num_new} tokens {parts}"
        else:
            what += ", and at least one is needed for the completion"
        raise ContextLengthError(
            what, param=field, num_prompt=num_prompt, limit=limit, num_new=num_new, remedy=remedy
        ) from error


class Salted(Protocol):
    """A request with this field."""

    cache_salt: str | None


def cache_salt(request: Salted, tenant: str) -> str:
    """The salt of cached blocks, which are shared only under the same tenant and cache_salt. Raises ApiError."""
    if len(request.cache_salt or "") > LONGEST_SALT:
        raise bad_field("cache_salt", f"cache_salt has more than {LONGEST_SALT} characters")
    if request.cache_salt == "":
        raise bad_field("cache_salt", "cache_salt is empty; leave it out, or give a text")
    return f"{tenant}/{request.cache_salt}" if request.cache_salt else tenant


NO_VARIABLES: Mapping[str, Any] = types.MappingProxyType({})
RESERVED = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
"""Names of a template's variables that requests set by fields of their own."""


class ChatPromptRequest(Protocol):
    """The fields of a request that determine how a conversation becomes a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


def template_variables(option: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checks the option default_chat_template_kwargs. Raises OptionError."""
    for name in option or {}:
        if name in RESERVED:
            raise OptionError(f"default_chat_template_kwargs sets {name}, which is a field of each request")
    return option or {}


class ChatPrompts:
    """Renders conversations with the server's template, the model's, or (where trusted) the request's."""

    def __init__(
        self,
        template: str | None,
        *,
        trusts_requests: bool,
        defaults: Mapping[str, Any] = NO_VARIABLES,
        content_format: ContentFormat = "auto",
    ) -> None:
        """defaults: variables that every template sees, unless a request sets them."""
        self._template, self._trusts_requests, self._defaults = template, trusts_requests, defaults
        self._content_format: ContentFormat = content_format

    def render(
        self,
        request: ChatPromptRequest,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer | None,
        *,
        tools: list[dict[str, Any]] | None,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        verbosity: str | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
    ) -> RenderedChat:
        """The prompt's text and its template. Raises ApiError, or InvalidRequestError with the template's message."""
        if tokenizer is None:
            raise bad_field("messages", "this engine runs without a tokenizer: use /v1/completions with token ids")
        if not messages:
            raise bad_field("messages", "messages is empty: give at least one")
        variables = dict(request.chat_template_kwargs or {})
        if enable_thinking is None and reasoning_effort == "none":
            enable_thinking = False
        named_fields = {
            "enable_thinking": enable_thinking,
            "reasoning_effort": reasoning_effort,
            "verbosity": verbosity,
        }
        for name, value in named_fields.items():
            if value is not None:
                variables.setdefault(name, value)
        for name in variables:
            if name in RESERVED:
                raise bad_field(
                    "chat_template_kwargs", f"chat_template_kwargs.{name} is a field of the request: give it there"
                )
        continues = bool(request.continue_final_message)
        begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        named = self._template
        if request.chat_template is not None:
            named = self._named_template(request.chat_template, tokenizer)
        template = tokenizer.get_chat_template(named, tools)
        options: dict[str, Any] = {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "tools": tools,
            "documents": documents,
            "variables": {**tokenizer.special_tokens_map, **self._defaults, **variables},
            "content_format": self._content_format,
        }
        plain = list(map(_plain, messages, itertools.count()))
        render: Callable[[Sequence[Message]], str] = functools.partial(render_chat, template, **options)
        if not may_move(plain):
            return RenderedChat(render(plain), template)
        with one_limit():
            return RenderedChat(render(place_instructions(template, plain, render)), template)

    def template(self, tokenizer: Tokenizer, tools: Sequence[Any] | None = None) -> str | None:
        """The template for conversations whose request brings none; None if there is no template."""
        try:
            return tokenizer.get_chat_template(self._template, tools)
        except InvalidRequestError:
            return None

    def _named_template(self, asked: str, tokenizer: Tokenizer) -> str:
        """The template, or its name, that a request asks for. Raises ApiError."""
        if not self._trusts_requests and asked not in tokenizer.chat_template_names:
            raise bad_field(
                "chat_template",
                "this server does not take templates from requests (its option trust_request_chat_template)",
                "unsupported_parameter",
            )
        return asked


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """The message in the form that templates expect. Raises ApiError."""
    plain = msgspec.structs.asdict(message)
    for name in ("annotations", *ChatMessage.unread):
        plain.pop(name, None)
    if (refusal := plain.pop("refusal", None)) is not None and message.content is None:
        plain["content"] = refusal
    if isinstance(message.content, list):
        is_result = message.role in ("tool", "function")
        parts = map(readable, message.content) if is_result else message.content
        plain["content"] = [_without_hints(part) for part in parts]
    try:
        complete = complete_message(plain, f"messages[{index}]")
    except InvalidRequestError as error:
        raise bad_field(str(error).partition(" ")[0], str(error)) from None
    if isinstance(complete["content"], list):
        where = f"messages[{index}].content"
        try:
            text_parts(complete["content"], where)  # checked here too, so that the error names the field
        except InvalidRequestError as error:
            raise bad_field(where, str(error), "unsupported_parameter") from None
    return complete


def _without_hints(part: Any) -> Any:
    if isinstance(part, dict) and "cache_control" in part:
        return {name: value for name, value in part.items() if name != "cache_control"}
    return part
