"""Ollama's /api/embed and /api/embeddings. Texts are cut at their end unless a request says otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.ollama.requests import options_without_effect, served_name
from headrace.frontend.http.apis.pooling.chunks import Pooled
from headrace.frontend.http.apis.pooling.pooled import (
    Dimensions,
    PooledAnswer,
    PoolingContext,
    PoolingUsage,
    TextOptions,
    checked_params,
    pooling_of,
    prepare_vectors,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.request.parameters.pooling_params import PoolingParams

_Model = Annotated[str, Meta(description="A served model, see GET /api/tags; with or without :latest")]
_Options = Annotated[dict[str, Any] | None, Meta(description="num_ctx and options of loading, without effect")]
_KeepAlive = Annotated[float | str | None, Meta(description="Accepted without effect: the model stays loaded")]


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed"""

    model: _Model
    input: Annotated[str | list[str], Meta(description="A text or a list of texts; none: nothing is embedded")]
    truncate: Annotated[
        bool | None, Meta(description="Cut texts that are too long, instead of refusing them; default: true")
    ] = None
    dimensions: Dimensions = None
    options: _Options = None
    keep_alive: _KeepAlive = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings"""

    model: _Model
    prompt: Annotated[str, Meta(description="The text; empty: nothing is embedded")]
    options: _Options = None
    keep_alive: _KeepAlive = None


class OllamaEmbedResponse(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    """In nanoseconds."""
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingsResponse(msgspec.Struct):
    embedding: list[float]


EMBED_NEUTRAL: Mapping[str, Neutral] = {"images": Neutral("models read text alone", ([],))}


def prepare_embed(
    request: OllamaEmbedRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest | OllamaEmbedResponse:
    """What to run, or the answer to a request without a text, by which clients load a model. Raises ApiError and
    InvalidRequestError."""
    options_without_effect(request.options, engine)
    if not request.input:
        return OllamaEmbedResponse(request.model, [])
    began_s = time.monotonic()

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> OllamaEmbedResponse:
        vectors, spent_s = [stream.parts[0].tolist() for stream in streams], time.monotonic() - began_s
        return OllamaEmbedResponse(request.model, vectors, round(1e9 * spent_s), 0, usage.prompt_tokens)

    params = _params(
        engine,
        request.model,
        use_activation=True,
        dimensions=request.dimensions,
        truncate_prompt_tokens=None if request.truncate is False else -1,
    )
    return prepare_vectors(request.input, params, engine, options, context, PooledAnswer(write))


def prepare_embeddings(
    request: OllamaEmbeddingsRequest, engine: Engine, options: ServeOptions, context: PoolingContext
) -> PreparedRequest | OllamaEmbeddingsResponse:
    """As `prepare_embed`."""
    options_without_effect(request.options, engine)
    if not request.prompt:
        return OllamaEmbeddingsResponse([])

    def write(streams: Sequence[Pooled], usage: PoolingUsage) -> OllamaEmbeddingsResponse:
        return OllamaEmbeddingsResponse(streams[0].parts[0].tolist())

    params = _params(engine, request.model, truncate_prompt_tokens=-1)
    return prepare_vectors(
        request.prompt, params, engine, options, context, PooledAnswer(write), TextOptions(param="prompt")
    )


def _params(engine: Engine, asked: str, **fields: Any) -> PoolingParams:
    """asked: the model's name in the request. Raises ApiError."""
    model = served_name(asked, engine.names)
    _, pooling = pooling_of(engine, model, "embeddings")
    return checked_params(pooling, model, task="embed", **fields)
