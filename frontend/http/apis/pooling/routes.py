"""The routes of models that pool hidden states: embeddings."""

from __future__ import annotations

import types

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.requests import NEUTRAL
from headrace.frontend.http.apis.pooling.embeddings import (
    EMBEDDING_NEUTRAL,
    EmbeddingRequest,
    EmbeddingResponse,
    prepare_embedding,
)
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, post
from headrace.frontend.http.server.state import ServerState


async def embeddings(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: EmbeddingRequest, engine: Engine, name: str) -> PreparedRequest:
        return prepare_embedding(request, engine, state.options, name, exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, EmbeddingRequest), prepare)


ROUTES = (
    post(
        "/v1/embeddings",
        embeddings,
        "Compute the embedding vectors of texts",
        EmbeddingRequest,
        EmbeddingResponse,
        GENERATION,
        access=Access.CLIENT,
    ),
)
_EMBEDDINGS = "of the pooling tasks, only embeddings are supported so far: POST /v1/embeddings"
_NOT_SERVED = types.MappingProxyType(
    dict.fromkeys(
        (
            *("/v2/embed", "/pooling", "/classify", "/v1/classify"),
            *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        ),
        _EMBEDDINGS,
    )
)
API = Api(
    routes=ROUTES,
    bodies=(Body(kind=EmbeddingRequest, called="embeddings", lacks={**NEUTRAL, **EMBEDDING_NEUTRAL}, foreign="last"),),
    not_served=_NOT_SERVED,
)
