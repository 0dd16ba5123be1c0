"""The routes of models that pool hidden states: embeddings, scores, classes."""

from __future__ import annotations

import types
from typing import Any

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.requests import NEUTRAL
from headrace.frontend.http.apis.pooling.embeddings import (
    EMBEDDING_NEUTRAL,
    EmbeddingRequest,
    EmbeddingResponse,
    prepare_embedding,
)
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
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, Handler, RouteSpec, post
from headrace.frontend.http.server.state import ServerState


async def embeddings(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: EmbeddingRequest, engine: Engine, name: str) -> PreparedRequest:
        return prepare_embedding(request, engine, state.options, name, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, EmbeddingRequest), prepare)


async def score(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: ScoreRequest, engine: Engine, name: str) -> PreparedRequest:
        return prepare_score(request, engine, state.options, name, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, ScoreRequest), prepare)


async def rerank(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: RerankRequest, engine: Engine, name: str) -> PreparedRequest:
        return prepare_rerank(request, engine, state.options, name, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, RerankRequest), prepare)


async def classify(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: ClassifyRequest, engine: Engine, name: str) -> PreparedRequest:
        return prepare_classify(request, engine, state.options, name, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, ClassifyRequest), prepare)


def _post(path: str, handler: Handler, summary: str, request: Any, response: Any) -> RouteSpec:
    return post(path, handler, summary, request, response, GENERATION, access=Access.CLIENT)


ROUTES = (
    _post("/v1/embeddings", embeddings, "Compute the embedding vectors of texts", EmbeddingRequest, EmbeddingResponse),
    *(_post(path, score, "Score pairs of texts", ScoreRequest, ScoreResponse) for path in ("/score", "/v1/score")),
    *(
        _post(path, rerank, "Order documents by relevance to a query", RerankRequest, RerankResponse)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        _post(path, classify, "Compute the classes of texts", ClassifyRequest, ClassifyResponse)
        for path in ("/classify", "/v1/classify")
    ),
)
_LATER = "not supported yet: POST /v1/embeddings, /score, /rerank and /classify are"
API = Api(
    routes=ROUTES,
    bodies=(
        Body(kind=EmbeddingRequest, called="embeddings", lacks={**NEUTRAL, **EMBEDDING_NEUTRAL}, foreign="last"),
        Body(kind=ScoreRequest, called="scores", lacks={**NEUTRAL, **SCORE_NEUTRAL}, foreign="last"),
        Body(kind=RerankRequest, called="rerankings", lacks={**NEUTRAL, **SCORE_NEUTRAL}, foreign="last"),
        Body(kind=ClassifyRequest, called="classes", lacks=NEUTRAL, foreign="last"),
    ),
    not_served=types.MappingProxyType(dict.fromkeys(("/v2/embed", "/pooling"), _LATER)),
)
