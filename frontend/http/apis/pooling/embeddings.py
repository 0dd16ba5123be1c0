"""POST /v1/embeddings: OpenAI's API, with vLLM's fields."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import MOST_TRUNCATED, cache_salt, tokenize_texts
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.server.decoding.foreign_fields import ANY, Neutral
from headrace.frontend.http.server.errors import ApiError, ContextLengthError, bad_field
from headrace.frontend.http.server.generation import Answer, PreparedRequest
from headrace.frontend.request.checks import TooLongError, check_length, check_token_ids
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_prompts import NOT_POOLING, as_pooled, cut_to_pool
from headrace.frontend.request.prompts import Prompt, Tokenization, packed
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

_OF_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens")
"""Fields that PoolingParams checks."""


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings"""

    model: Annotated[str | None, Meta(description="A served model, see GET /v1/models; default: the first of them")] = (
        None
    )
    input: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, a list of texts, a list of token ids, or a list of such lists"),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: little-endian float32; default: float")
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="Number of values to which a vector is cut, if the model supports it")
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="Scale vectors to length 1; default: the model's own setting")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Maximum number of tokens of a text to keep; -1: as many as the model takes"),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(description="Side on which tokens are removed: left or right; default: right"),
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Add special tokens to texts; default: true")] = None
    priority: Annotated[
        int | None, Meta(description="Scheduling priority, lower values first; needs --scheduling-policy priority")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached prefixes are shared only among requests with the same salt")
    ] = None
    request_id: Annotated[str | None, Meta(description="Id of the request; also the header X-Request-Id")] = None
    user: Annotated[str | None, Meta(description="Accepted without effect")] = None


_LATER = "not supported yet"
EMBEDDING_NEUTRAL: Mapping[str, Neutral] = {
    "messages": Neutral("conversations are not embedded: POST /tokenize gives a conversation's tokens for input", ()),
    "embed_dtype": Neutral(f"{_LATER}: values are float32", ("float32",)),
    "endianness": Neutral(f"{_LATER}: values are little-endian", ("native", "little")),
    "padding": Neutral("nothing is padded", ("do_not_pad",)),
    "mm_processor_kwargs": Neutral("models read text alone", ({},)),
    "normalize": Neutral("the former name of use_activation", ()),
    "input_type": Neutral(f"prompts by name are {_LATER}: put the instruction before the text", ()),
    "prompt_name": Neutral(f"prompts by name are {_LATER}: put the instruction before the text", ()),
    "stream": Neutral("vectors are answered whole", (False,)),
    "metadata": Neutral("nothing depends on it", (ANY,), is_harmless=True),
}
"""Fields of OpenAI's and vLLM's APIs that these requests lack."""


class EmbeddingItem(msgspec.Struct):
    index: int
    object: str
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


def prepare_embedding(
    request: EmbeddingRequest, engine: Engine, options: ServeOptions, name: str, tenant: str
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    assert engine.client is not None
    client, model = engine.client, request.model or engine.names[0]
    welcome = client.welcome
    if welcome.pooling is None:
        raise ApiError(404, f"the model {model!r:.200} makes no embeddings: {NOT_POOLING}", code="not_found")
    try:
        params = PoolingParams(
            task="embed",
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        params.to_wire(welcome.pooling, model)
    except InvalidRequestError as error:
        named = next((name for name in _OF_PARAMS if name in str(error)), "model")
        raise bad_field(named, str(error).removeprefix("PoolingParams.")) from error
    prompts = _prompts(request, params, client.tokenizer, options, welcome)
    salt, id = cache_salt(request, tenant), f"embd-{name}"
    for index, prompt in enumerate(prompts):
        prompt.cache_salt = salt
        check_prompt(prompt, params, welcome, "input" if len(prompts) == 1 else f"input[{index}]")
    answer = EmbeddingAnswer(id, model, in_base64=request.encoding_format == "base64")
    return PreparedRequest(engine, id, prompts, [params] * len(prompts), answer, priority=request.priority or 0)


def _prompts(
    request: EmbeddingRequest,
    params: PoolingParams,
    tokenizer: Tokenizer | None,
    options: ServeOptions,
    welcome: Welcome,
) -> list[Prompt]:
    items = items_of(request.input)
    request.input = ""  # frees it: it may be large, and is not read again
    if len(items) > options.max_prompts:
        raise bad_field("input", f"{len(items)} inputs; this server takes at most {options.max_prompts} at once")
    how = Tokenization(truncation_side=request.truncation_side)
    if not isinstance(items[0], str):
        prompts = [Prompt(token_ids=packed(each)) for each in items]
        cut_to_pool(prompts, [params] * len(prompts), tokenizer, how, welcome)
        return prompts
    texts = [as_pooled(each, welcome, "embed") for each in items]
    most = welcome.max_model_len * (1 if request.truncate_prompt_tokens is None else MOST_TRUNCATED)
    special = request.add_special_tokens is not False
    encoded = tokenize_texts(texts, tokenizer, special=special, max_tokens=most, param="input")
    prompts = [Prompt(text=text, token_ids=ids) for text, ids in zip(texts, encoded, strict=True)]
    cut_to_pool(prompts, [params] * len(prompts), tokenizer, how, welcome)
    return prompts


def items_of(given: Any) -> list[Any]:
    """A list of texts or of lists of token ids."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise bad_field("input", "input is an empty list: give a text, token ids, or a list of either")
    if isinstance(given[0], int):
        given = [given]
    kind = str if isinstance(given[0], str) else list
    for index, item in enumerate(given):
        if not isinstance(item, kind):
            raise bad_field(f"input[{index}]", "a list of inputs holds either texts or lists of token ids")
        if kind is list and not all(isinstance(each, int) for each in item):
            raise bad_field(f"input[{index}]", "a list of token ids holds integers alone")
        if not item:
            raise bad_field(
                f"input[{index}]" if len(given) > 1 else "input", "an input is empty; give at least one token"
            )
    found: list[Any] = given
    return found


def check_prompt(prompt: Prompt, params: PoolingParams, welcome: Welcome, param: str) -> None:
    """Raises ApiError for a tokenised prompt that the engine cannot take."""
    if params.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens: 0 leaves no token; give -1, or 1 or more")
    try:
        check_length(prompt, welcome, answer=0)
        check_token_ids(prompt, welcome)
    except TooLongError as error:
        raise ContextLengthError(
            f"your {param} resulted in {error.num_prompt} tokens",
            param=param,
            num_prompt=error.num_prompt,
            limit=error.limit,
            remedy=", or give truncate_prompt_tokens: -1",
        ) from error
    except InvalidRequestError as error:
        raise bad_field(param, str(error).replace("prompt_token_ids", param)) from error


class EmbeddingAnswer(Answer):
    """Writes the response. It is never streamed."""

    def __init__(self, id: str, model: str, *, in_base64: bool) -> None:
        self._id, self._model, self._in_base64 = id, model, in_base64

    def whole(self) -> list[bytes]:
        items, num_tokens = list[EmbeddingItem](), 0
        for index, stream in enumerate(self.streams):
            assert isinstance(stream, PoolingStream), "its prompts are pooled"
            assert stream.vectors is not None, "the streams have ended"
            values: list[Any] = [] if self._in_base64 else stream.vectors.tolist()
            told = base64.b64encode(stream.vectors).decode() if self._in_base64 else values
            items.append(EmbeddingItem(index, "embedding", told))
            num_tokens += len(stream.prompt.token_ids or ())
        usage, created = EmbeddingUsage(num_tokens, num_tokens), int(time.time())
        return [msgspec.json.encode(EmbeddingResponse(self._id, "list", created, self._model, items, usage))]
