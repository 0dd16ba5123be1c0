"""POST /v2/embed: Cohere's API (its /v2/rerank is in `pooling/`)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.prompts import cache_salt
from headrace.frontend.http.apis.openai.requests import NEUTRAL
from headrace.frontend.http.apis.pooling.chunks import Pooled
from headrace.frontend.http.apis.pooling.pooled import (
    Dimensions,
    PooledAnswer,
    PooledFields,
    PoolingContext,
    PoolingUsage,
    TextOptions,
    check_count,
    checked_params,
    items_of,
    names_of,
    pooling_of,
    prompts_of,
    ready,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, post
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.request.pooling_prompts import longest_text, prompt_of_type
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.request.vector_encodings import as_bits, as_bytes, as_int8, as_uint8
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PooledFields, kw_only=True):
    """POST /v2/embed"""

    texts: Annotated[list[str] | None, Meta(description="The texts; or inputs")] = None
    inputs: Annotated[
        list[dict[str, Any]] | None,
        Meta(description='Texts as {"content": [{"type": "text", "text": ...}]}; the parts of one are joined'),
    ] = None
    input_type: Annotated[
        str | None,
        Meta(
            description="search_document, search_query, classification or clustering, which chooses a prompt of the "
            "model's folder, or the name of such a prompt"
        ),
    ] = None
    output_dimension: Dimensions = None
    embedding_types: Annotated[
        list[EmbeddingType] | None,
        Meta(
            description="int8: each value as a share of the vector's largest, which is 127, and uint8 with 128 added; "
            "binary and ubinary: eight signs in a number; base64: little-endian float32; default: float"
        ),
    ] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        Meta(description="Side at which a text that is too long is cut, or NONE to refuse it; default: END"),
    ] = None
    max_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Most tokens of a text")] = None


class CohereEmbeddings(msgspec.Struct, omit_defaults=True):
    float_: list[list[float]] | None = msgspec.field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereApiVersion(msgspec.Struct):
    version: str = "2"


class CohereBilledUnits(msgspec.Struct):
    input_tokens: int
    image_tokens: int = 0


class CohereMeta(msgspec.Struct):
    api_version: CohereApiVersion
    billed_units: CohereBilledUnits


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


COHERE_NEUTRAL = {"images": Neutral("models read text alone", ([],))}


async def embed(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: CohereEmbedRequest, engine: Engine, id: str) -> PreparedRequest:
        return prepare_embed(request, engine, id, state.options, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, CohereEmbedRequest), prepare, "embd-")


def prepare_embed(
    request: CohereEmbedRequest, engine: Engine, id: str, options: ServeOptions, tenant: str
) -> PreparedRequest:
    """Raises ApiError and InvalidRequestError."""
    model = request.model or engine.names[0]
    welcome, pooling = pooling_of(engine, model, "embeddings")
    field, most = "texts" if request.inputs is None else "inputs", longest_text(welcome)
    texts = _texts(request)
    items_of(texts, field)
    check_count(field, texts, options)
    try:
        named = prompt_of_type(request.input_type, welcome)
    except InvalidRequestError as error:
        raise bad_field("input_type", str(error)) from error
    params = checked_params(
        pooling,
        model,
        task="embed",
        dimensions=request.output_dimension,
        truncate_prompt_tokens=None if request.truncate == "NONE" else min(request.max_tokens or most, most),
        prompt_name=named,
    )
    types = request.embedding_types or ["float"]
    width = request.output_dimension or pooling.default_dimensions or pooling.width
    if width % 8 and {"binary", "ubinary"} & set(types):
        raise bad_field(
            "embedding_types", f"embedding_types: eight signs are one number of binary, and vectors have {width} values"
        )
    side: Literal["left"] | None = "left" if request.truncate == "START" else None
    prompts = prompts_of(texts, params, engine, TextOptions(side, param=field))
    if request.truncate == "NONE":
        _check_lengths(prompts, field, request.max_tokens, welcome)
    context = PoolingContext(id, cache_salt(request, tenant), request.priority, request.model)

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> CohereEmbedResponse:
        meta = CohereMeta(CohereApiVersion(), CohereBilledUnits(usage.prompt_tokens))
        return CohereEmbedResponse(context.id, _encoded(streams, types), texts, meta)

    return ready(engine, prompts, names_of(field, len(prompts)), params, context, PooledAnswer(write))


def _texts(request: CohereEmbedRequest) -> list[str]:
    if (request.texts is None) == (request.inputs is None):
        raise bad_field("texts", "give either texts or inputs")
    if request.texts is not None:
        return request.texts
    texts = []
    for index, each in enumerate(request.inputs or ()):
        parts = each.get("content")
        for part in parts if isinstance(parts, list) else [None]:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad_field(
                    f"inputs[{index}].content",
                    f'inputs[{index}].content must be a list of {{"type": "text", "text": ...}} alone',
                )
        texts.append("".join(part["text"] for part in parts or ()))
    return texts


def _check_lengths(prompts: Sequence[Prompt], field: str, most: int | None, welcome: Welcome) -> None:
    longest = longest_text(welcome)
    limit = min(most or longest, longest)
    for prompt, param in zip(prompts, names_of(field, len(prompts)), strict=True):
        if (count := len(prompt.token_ids or ())) > limit:
            raise bad_field(
                param, f"{param} has {count} tokens, of at most {limit}, and truncate is NONE: give START or END"
            )


def _encoded(streams: Sequence[Pooled], types: Sequence[EmbeddingType]) -> CohereEmbeddings:
    made, parts = CohereEmbeddings(), [stream.parts[0] for stream in streams]
    vectors: list[list[float]] = [part.tolist() for part in parts]
    for each in types:
        match each:
            case "float":
                made.float_ = vectors
            case "base64":
                made.base64 = [base64.b64encode(as_bytes(part.values, "float32", "little")).decode() for part in parts]
            case "int8":
                made.int8 = [as_int8(vector) for vector in vectors]
            case "uint8":
                made.uint8 = [as_uint8(vector) for vector in vectors]
            case "binary":
                made.binary = [as_bits(vector, signed=True) for vector in vectors]
            case "ubinary":
                made.ubinary = [as_bits(vector, signed=False) for vector in vectors]
    return made


API = Api(
    routes=(
        post(
            "/v2/embed",
            embed,
            "Cohere's API: compute the embedding vectors of texts",
            CohereEmbedRequest,
            CohereEmbedResponse,
            GENERATION,
            access=Access.CLIENT,
        ),
    ),
    bodies=(
        Body(
            kind=CohereEmbedRequest, called="Cohere's embeddings", lacks={**NEUTRAL, **COHERE_NEUTRAL}, foreign="last"
        ),
    ),
)
