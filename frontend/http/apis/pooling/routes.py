"""The routes of models that pool hidden states: embeddings, scores, classes. /rerank is also TEI's, by its fields."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.chat import ChatParts
from headrace.frontend.http.apis.openai.requests import NEUTRAL
from headrace.frontend.http.apis.pooling.conversations import TextFields, take_messages
from headrace.frontend.http.apis.pooling.embeddings import (
    EMBEDDING_NEUTRAL,
    POOLING_NEUTRAL,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    prepare_embedding,
    prepare_pooling,
)
from headrace.frontend.http.apis.pooling.pooled import PoolingContext
from headrace.frontend.http.apis.pooling.scores import (
    SCORE_NEUTRAL,
    ClassifyRequest,
    ClassifyResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    prepare_classify,
    prepare_rerank,
    prepare_score,
)
from headrace.frontend.http.apis.tei.requests import TeiRerankRequest
from headrace.frontend.http.apis.tei.requests import prepare_rerank as prepare_tei_rerank
from headrace.frontend.http.apis.tei.routes import error_body as tei_error_body
from headrace.frontend.http.apis.tei.routes import statuses as tei_statuses
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, RouteSpec, post
from headrace.frontend.http.server.state import ServerState

Prepare = Callable[[Any, Engine, str, ServeOptions, str], PreparedRequest]
"""Makes what is run of a request, an engine, the response's id, the server's options, and the tenant."""


async def _generate(state: ServerState, exchange: Exchange, *, kind: type[Any], prepare: Prepare, prefix: str) -> None:
    def prepared(request: Any, engine: Engine, id: str) -> PreparedRequest:
        return prepare_texts(prepare, request, engine, id, state, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, kind), prepared, prefix)


def prepare_texts(
    prepare: Prepare, request: Any, engine: Engine, id: str, state: ServerState, tenant: str
) -> PreparedRequest:
    """As `prepare`, of a request that may have conversations in the place of texts."""
    if isinstance(request, TextFields):
        take_messages(request, engine, state.of(ChatParts).prompts)
    return prepare(request, engine, id, state.options, tenant)


async def rerank(state: ServerState, exchange: Exchange) -> None:
    def decode(body: bytes) -> RerankRequest | TeiRerankRequest:
        kinds: dict[str, Any] = {"documents": RerankRequest, "texts": TeiRerankRequest}
        request = state.decoder.decode_one_of(body, kinds) if b'"texts"' in body else None
        return state.decoder.decode(body, RerankRequest) if request is None else request

    def prepare(request: RerankRequest | TeiRerankRequest, engine: Engine, id: str) -> PreparedRequest:
        if isinstance(request, TeiRerankRequest):
            exchange.error_body = tei_error_body
            with tei_statuses():
                return prepare_tei_rerank(request, engine, state.options, PoolingContext(id, exchange.tenant))
        return prepare_rerank(request, engine, id, state.options, exchange.tenant)

    await state.generate(exchange, decode, prepare, PREPARES[RerankRequest][0])


PREPARES: Mapping[type[Any], tuple[str, Prepare]] = types.MappingProxyType(
    {
        EmbeddingRequest: ("embd-", prepare_embedding),
        PoolingRequest: ("pool-", prepare_pooling),
        ScoreRequest: ("embd-", prepare_score),
        RerankRequest: ("rerank-", prepare_rerank),
        ClassifyRequest: ("classify-", prepare_classify),
    }
)
"""By kind of request: the prefix of its response's id, and what prepares it."""


def _post(path: str, summary: str, request: type[Any], response: Any) -> RouteSpec:
    prefix, prepare = PREPARES[request]
    handler = functools.partial(_generate, kind=request, prepare=prepare, prefix=prefix)
    return post(path, handler, summary, request, response, GENERATION, access=Access.CLIENT)


ROUTES = (
    *(
        _post(path, "Compute the embedding vectors of texts", EmbeddingRequest, EmbeddingResponse)
        for path in ("/v1/embeddings", "/embeddings")
    ),
    _post("/pooling", "Compute vectors, classes or rewards of texts", PoolingRequest, PoolingResponse),
    *(_post(path, "Score pairs of texts", ScoreRequest, ScoreResponse) for path in ("/score", "/v1/score")),
    *(
        post(
            path,
            rerank,
            "Order documents by relevance to a query",
            RerankRequest,
            RerankResponse,
            GENERATION,
            access=Access.CLIENT,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        _post(path, "Compute the classes of texts", ClassifyRequest, ClassifyResponse)
        for path in ("/classify", "/v1/classify")
    ),
)
API = Api(
    routes=ROUTES,
    bodies=(
        Body(kind=EmbeddingRequest, called="embeddings", lacks={**NEUTRAL, **EMBEDDING_NEUTRAL}, foreign="last"),
        Body(kind=PoolingRequest, called="pooling", lacks={**NEUTRAL, **POOLING_NEUTRAL}, foreign="last"),
        Body(kind=ScoreRequest, called="scores", lacks={**NEUTRAL, **SCORE_NEUTRAL}, foreign="last"),
        Body(kind=RerankRequest, called="rerankings", lacks={**NEUTRAL, **SCORE_NEUTRAL}, foreign="last"),
        Body(kind=ClassifyRequest, called="classes", lacks=NEUTRAL, foreign="last"),
    ),
)
