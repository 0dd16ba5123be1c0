"""What the routes for vectors, scores and classes share: fields, prompts and their checks, what writes responses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import MOST_TRUNCATED, check_prompt, check_unicode, tokenize_texts
from headrace.frontend.http.apis.pooling.chunks import Pooled, in_chunks, joined
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import adapters_of
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.exchange import JSON, Headers
from headrace.frontend.http.server.generation import Answer, PreparedRequest, id_of_prompt
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_prompts import (
    NOT_POOLING,
    as_pooled,
    cut_to_pool,
    cuts_left,
    longest_text,
    most_tokens,
)
from headrace.frontend.request.prompts import Prompt, Tokenization, packed
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Pooling, Welcome

Model = Annotated[str | None, Meta(description="A served model, see GET /v1/models; default: the first of them")]
Input = Annotated[
    str | list[str | int | list[int]],
    Meta(description="A text, a list of texts, a list of token ids, or a list of such lists"),
]
Truncation = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(description="Maximum number of tokens of a text to keep; -1: as many as the model takes"),
]
Side = Annotated[
    Literal["left", "right"] | None,
    Meta(
        description="Side on which tokens are removed: left or right; default: as the tokenizer's files say, or right"
    ),
]
Dimensions = Annotated[
    int | None, Meta(description="Number of values to which a vector is cut, if the model supports it")
]
SpecialTokens = Annotated[bool | None, Meta(description="Add special tokens to texts; default: true")]
PromptName = Annotated[
    str | None, Meta(description="Name of a prompt of the model's folder that is put before a text, such as query")
]
RequestId = Annotated[str | None, Meta(description="Id of the request; also the header X-Request-Id")]


class PooledFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all requests for vectors, scores and classes, whatever their texts are."""

    model: Model = None
    priority: Annotated[
        int | None, Meta(description="Scheduling priority, lower values first; needs --scheduling-policy priority")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached prefixes are shared only among requests with the same salt")
    ] = None
    request_id: RequestId = None
    user: Annotated[str | None, Meta(description="Accepted without effect")] = None


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class PoolingContext(NamedTuple):
    """What a response and its requests have of who asks."""

    id: str
    """Of the response."""
    salt: str
    """Of cached prefixes."""
    priority: int | None = None
    model: str | None = None
    """As the request names it: an adapter, too."""


class TextOptions(NamedTuple):
    """How texts become prompts."""

    side: Literal["left", "right"] | None = None
    special: bool = True
    param: str = "input"
    """The field of the texts, for errors."""


_OF_INPUT = TextOptions()

Write = Callable[[Sequence[Pooled], PoolingUsage], msgspec.Struct | list[Any] | bytes]


class PooledAnswer(Answer):
    """Writes the response of all vectors. It is never streamed."""

    def __init__(self, write: Write, headers: Callable[[PoolingUsage], Headers] | None = None) -> None:
        """write: returns what is encoded as JSON, or bytes with headers of their own."""
        self._write, self._make_headers = write, headers
        self.counts: Sequence[int] | None = None
        """Of how many requests each prompt's result is made; None: of one."""

    @functools.cached_property
    def pooled(self) -> Sequence[Pooled]:
        """The results of the prompts, once all streams have ended."""
        streams = [stream for stream in self.streams if isinstance(stream, PoolingStream)]
        return streams if self.counts is None else joined(streams, self.counts)

    def whole(self) -> list[bytes]:
        streams = [stream for stream in self.streams if isinstance(stream, PoolingStream)]
        num_tokens = sum(len(stream.prompt.token_ids or ()) for stream in streams)
        usage = PoolingUsage(num_tokens, num_tokens)
        self.headers = JSON if self._make_headers is None else self._make_headers(usage)
        made = self._write(self.pooled, usage)
        return [made if isinstance(made, bytes) else msgspec.json.encode(made)]


def pooling_of(engine: Engine, model: str, what: str) -> tuple[Welcome, Pooling]:
    """Raises ApiError (404) for a model that does not pool. what: what is asked for, as `embeddings`."""
    welcome = engine.connected.welcome
    if welcome.pooling is None:
        raise ApiError(404, f"the model {model!r:.200} makes no {what}: {NOT_POOLING}", code="not_found")
    return welcome, welcome.pooling


def checked_params(pooling: Pooling, model: str, **fields: Any) -> PoolingParams:
    """Frozen PoolingParams of these fields, which the model can carry out. Raises ApiError that names the field."""
    try:
        return PoolingParams(**fields).freeze(pooling, model)
    except InvalidRequestError as error:
        named = next((name for name in _OF_PARAMS if name in str(error)), "model")
        raise bad_field(named.removeprefix("PoolingParams."), str(error).removeprefix("PoolingParams.")) from error


_OF_PARAMS = (
    *("dimensions", "use_activation", "truncate_prompt_tokens", "step_tag_id", "returned_token_ids"),
    *("prompt_name", "PoolingParams.task"),
)
"""Fields that PoolingParams checks, by what its errors have of them."""


class EmptyListError(ApiError):
    """An input that has no texts. text-embeddings-inference tells it from others."""

    def __init__(self, param: str, remedy: str) -> None:
        super().__init__(400, f"{param} is an empty list: {remedy}", param=param, code="invalid_value")


def items_of(given: Any, param: str = "input") -> list[Any]:
    """A list of texts or of lists of token ids. Raises ApiError."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise EmptyListError(param, "give a text, token ids, or a list of either")
    is_one = isinstance(given[0], int)
    if is_one:
        given = [given]
    kind = str if isinstance(given[0], str) else list
    for index, item in enumerate(given):
        if not isinstance(item, kind):
            raise bad_field(f"{param}[{index}]", "a list of inputs holds either texts or lists of token ids")
        wrong = next((at for at, each in enumerate(item) if not isinstance(each, int)), None) if kind is list else None
        if wrong is not None:
            where = param if is_one else f"{param}[{index}]"
            raise bad_field(f"{where}[{wrong}]", "a list of token ids holds integers alone")
        if not item:
            raise bad_field(
                f"{param}[{index}]" if len(given) > 1 else param, "an input is empty; give at least one token"
            )
    found: list[Any] = given
    return found


def check_count(param: str, items: Sequence[Any], options: ServeOptions) -> None:
    """Raises ApiError."""
    if len(items) > options.max_prompts:
        raise bad_field(param, f"{len(items)} inputs; this server takes at most {options.max_prompts} at once")


def prompts_of(items: Sequence[Any], params: PoolingParams, engine: Engine, how: TextOptions) -> list[Prompt]:
    """Prompts of texts or of lists of token ids, tokenised and truncated. Raises ApiError."""
    client, cut = engine.connected, Tokenization(truncation_side=how.side)
    if not isinstance(items[0], str):
        prompts = [Prompt(token_ids=packed(each)) for each in items]
        cut_to_pool(prompts, [params] * len(prompts), client.tokenizer, cut, client.welcome)
        return prompts
    try:
        texts = [as_pooled(each, client.welcome, params) for each in items]
    except InvalidRequestError as error:
        raise bad_field("prompt_name", str(error)) from error
    most, kept = most_encoded(params, client.welcome), most_tokens(cut, params, client.welcome)
    if kept is not None and client.tokenizer is not None:
        texts = [enough_of(text, kept, client.tokenizer, from_left=cuts_left(cut, client.tokenizer)) for text in texts]
    encoded = tokenize_texts(texts, client.tokenizer, special=how.special, max_tokens=most, param=how.param)
    prompts = [Prompt(text=text, token_ids=ids) for text, ids in zip(texts, encoded, strict=True)]
    cut_to_pool(prompts, [params] * len(prompts), client.tokenizer, cut, client.welcome)
    return prompts


def enough_of(text: str, kept: int, tokenizer: Tokenizer, *, from_left: bool) -> str:
    """The text, or so much of it that its first (from_left: last) `kept` tokens are those of the whole: a long text
    takes long to tokenise. Raises ApiError for invalid Unicode."""
    size = max(kept, 1) * _CHARACTERS_OF_A_TOKEN
    if len(text) > size:
        check_unicode(text)
    while len(text) > size:
        part = text[-size:] if from_left else text[:size]
        if tokenizer.count_tokens(part) >= kept + _SLACK_TOKENS:
            return part
        size *= 2
    return text


_CHARACTERS_OF_A_TOKEN, _SLACK_TOKENS = 16, 64
"""How many characters are tokenised at first for each token that is kept; and tokens beside a cut that may differ."""


def most_encoded(params: PoolingParams, welcome: Welcome) -> int:
    """The most tokens of a text that is tokenised at all."""
    cuts = params.truncate_prompt_tokens is not None
    return longest_text(welcome) * (MOST_TRUNCATED if cuts else 1)


def names_of(param: str, count: int) -> list[str]:
    """Of the inputs, for errors."""
    return [param] if count == 1 else [f"{param}[{index}]" for index in range(count)]


def prepare_vectors(
    given: Any,
    params: PoolingParams,
    engine: Engine,
    options: ServeOptions,
    context: PoolingContext,
    answer: PooledAnswer,
    how: TextOptions = _OF_INPUT,
) -> PreparedRequest:
    """A request for what the model makes of texts or of lists of token ids, of the field `how.param`. Raises
    ApiError."""
    items = items_of(given, how.param)
    check_count(how.param, items, options)
    prompts = prompts_of(items, params, engine, how)
    return ready(engine, prompts, names_of(how.param, len(prompts)), params, context, answer)


def ready(
    engine: Engine,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    params: PoolingParams,
    context: PoolingContext,
    answer: PooledAnswer,
) -> PreparedRequest:
    """names: the prompts' fields, for errors. A prompt that is longer than the engine takes is asked for in chunks, if
    the model's pooling has them. Raises ApiError."""
    welcome = engine.connected.welcome
    if welcome.pooling is not None and welcome.pooling.longest is not None and params.task == "embed":
        answer.counts, prompts, names = in_chunks(prompts, names, welcome)
    return PreparedRequest(engine, context.id, checked(engine, prompts, names, params, context), answer)


def checked(
    engine: Engine, prompts: Sequence[Prompt], names: Sequence[str], params: PoolingParams, context: PoolingContext
) -> list[CheckedRequest]:
    """What the engine is asked for, of tokenised prompts. names: the prompts' fields, for errors. Raises ApiError."""
    if params.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens: 0 leaves no token; give -1, or 1 or more")
    adapters, requests = adapters_of(engine, context.model), list[CheckedRequest]()
    for index, (prompt, param) in enumerate(zip(prompts, names, strict=True)):
        prompt.cache_salt, prompt.adapters = context.salt, adapters
        id = id_of_prompt(context.id, index, len(prompts))
        try:
            requests.append(check_prompt(id, prompt, params, engine.connected, param, priority=context.priority))
        except InvalidRequestError as error:
            raise bad_field(param, str(error).replace("prompt_token_ids", param)) from error
    return requests
