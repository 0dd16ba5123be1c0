"""The routes of text-embeddings-inference. `pooling/` serves its /rerank too, whose fields tell requests apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.requests import NEUTRAL
from headrace.frontend.http.apis.pooling.embeddings import SparseValue
from headrace.frontend.http.apis.pooling.pooled import EmptyListError, PoolingContext
from headrace.frontend.http.apis.tei.requests import (
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiEmbedSparseRequest,
    TeiPrediction,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    prepare_embed,
    prepare_embed_all,
    prepare_embed_sparse,
    prepare_predict,
    prepare_rerank,
    prepare_similarity,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import UNAVAILABLE, Handler, RouteSpec, get, post
from headrace.frontend.http.server.state import GeneratingRequest, ServerState
from headrace.ipc.failure import HeadraceError

R = TypeVar("R", bound=GeneratingRequest)
Prepare = Callable[[Any, Engine, ServeOptions, PoolingContext], PreparedRequest]


class TeiError(msgspec.Struct):
    error: str
    error_type: str


def error_body(error: ApiError) -> bytes:
    """An error in text-embeddings-inference's format."""
    kind = "Validation" if error.status < 500 else "Backend"
    if isinstance(error, EmptyListError):
        kind = "Empty"
    return msgspec.json.encode(TeiError(error.body.message, _KINDS.get(error.status, kind)))


_KINDS = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
REFUSALS = (400, 404, 413, 415, 422, 424, 429, 503, 504)


@contextmanager
def statuses() -> Iterator[None]:
    """Gives errors text-embeddings-inference's statuses: 422 for what a request says, but 400 if it has no texts or is
    no JSON; 424 for a failure in the engine."""
    try:
        yield
    except (ApiError, HeadraceError) as error:
        told = ApiError.of(error)
        if told.status == HTTPStatus.BAD_REQUEST and not isinstance(told, EmptyListError):
            is_json = told.body.code != "invalid_json"
            told.status = HTTPStatus.UNPROCESSABLE_ENTITY if is_json else HTTPStatus.BAD_REQUEST
        elif told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            told.status = HTTPStatus.FAILED_DEPENDENCY
        if told is error:
            raise
        raise told from error


async def answer(
    state: ServerState, exchange: Exchange, decode: Callable[[bytes], Any], prepare: Callable[[Any], Prepare]
) -> None:
    """prepare: from a decoded request to the function that prepares it."""

    def prepared(request: Any, engine: Engine, id: str) -> PreparedRequest:
        return prepare(request)(request, engine, state.options, PoolingContext(id, exchange.tenant))

    with statuses():
        await state.generate(exchange, decode, prepared, "tei-")


def _answering(kind: type[Any], prepare: Prepare) -> Handler:
    async def handle(state: ServerState, exchange: Exchange) -> None:
        await answer(state, exchange, lambda body: state.decoder.decode(body, kind), lambda request: prepare)

    return handle


async def root(state: ServerState, exchange: Exchange) -> None:
    """POST /: what the model is for, as the clients of Hugging Face's hub ask for it."""

    def decode(body: bytes) -> Any:
        if b'"texts"' in body:
            kinds: dict[str, Any] = {"texts": TeiRerankRequest, "inputs": TeiEmbedRequest}
            return state.decoder.decode_one_of(body, kinds)
        engine = engine_for(state.pool, None)
        pooling = None if engine.client is None else engine.client.welcome.pooling
        classifies = pooling is not None and "classify" in pooling.kinds
        return state.decoder.decode(body, TeiPredictRequest if classifies else TeiEmbedRequest)

    by_kind: dict[type, Prepare] = {
        TeiRerankRequest: prepare_rerank,
        TeiPredictRequest: prepare_predict,
        TeiEmbedRequest: prepare_embed,
    }
    await answer(state, exchange, decode, lambda request: by_kind[type(request)])


class TeiInfo(msgspec.Struct):
    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None


async def info(state: ServerState, exchange: Exchange) -> None:
    engine = engine_for(state.pool, None)
    welcome = engine.connected.welcome
    kind: dict[str, dict[str, Any]] = {}
    if (pooling := welcome.pooling) is not None:
        labels = {str(number): label for number, label in enumerate(pooling.labels)}
        if not labels:
            kind = {"embedding": {"pooling": {"LAST": "last_token"}.get(pooling.tokens, pooling.tokens.lower())}}
        else:
            named = {label: number for number, label in labels.items()}
            kind = {"reranker" if pooling.width == 1 else "classifier": {"id2label": labels, "label2id": named}}
    await exchange.answer(
        TeiInfo(
            model_id=welcome.model,
            model_sha=None,
            model_dtype=welcome.dtype,
            served_model_name=welcome.served_model_names[0],
            model_type=kind,
            max_concurrent_requests=welcome.max_num_seqs + welcome.max_waiting_requests,
            max_input_length=welcome.max_model_len,
            max_batch_tokens=welcome.max_num_batched_tokens,
            max_batch_requests=welcome.max_num_seqs,
            max_client_batch_size=state.options.max_prompts,
            auto_truncate=True,
            tokenization_workers=1,
            version=welcome.version,
        )
    )


def _post(path: str, handler: Handler, summary: str, request: Any, response: Any) -> RouteSpec:
    said = f"text-embeddings-inference: {summary}"
    return post(path, handler, said, request, response, REFUSALS, access=Access.CLIENT, error_body=error_body)


_EMBED = _answering(TeiEmbedRequest, prepare_embed)
ROUTES = (
    _post("/embed", _EMBED, "compute the embedding vectors of texts", TeiEmbedRequest, list[list[float]]),
    _post(
        "/embed_all",
        _answering(TeiEmbedAllRequest, prepare_embed_all),
        "compute a vector for each token of texts",
        TeiEmbedAllRequest,
        list[list[list[float]]],
    ),
    _post(
        "/embed_sparse",
        _answering(TeiEmbedSparseRequest, prepare_embed_sparse),
        "compute sparse vectors of texts",
        TeiEmbedSparseRequest,
        list[list[SparseValue]],
    ),
    _post(
        "/predict",
        _answering(TeiPredictRequest, prepare_predict),
        "compute the classes of texts or of pairs of them",
        TeiPredictRequest,
        list[TeiPrediction | list[TeiPrediction]],
    ),
    _post(
        "/similarity",
        _answering(TeiSimilarityRequest, prepare_similarity),
        "compare a text with others",
        TeiSimilarityRequest,
        list[float],
    ),
    _post("/", root, "embed texts, or classify or order them, as the model does", TeiEmbedRequest, None),
    get(
        "/info",
        info,
        "text-embeddings-inference: describe the model and the server's limits",
        TeiInfo,
        access=Access.CLIENT,
        error_body=error_body,
        refusals=UNAVAILABLE,
    ),
)
_HINT = "requests of text-embeddings-inference have inputs"
API = Api(
    routes=ROUTES,
    bodies=tuple(
        Body(kind=kind, called=called, lacks=NEUTRAL, foreign="last", hint=_HINT)
        for kind, called in (
            (TeiEmbedRequest, "text-embeddings-inference's embeddings"),
            (TeiEmbedAllRequest, "text-embeddings-inference's tokens"),
            (TeiEmbedSparseRequest, "text-embeddings-inference's sparse vectors"),
            (TeiPredictRequest, "text-embeddings-inference's classes"),
            (TeiRerankRequest, "text-embeddings-inference's rerankings"),
            (TeiSimilarityRequest, "text-embeddings-inference's similarities"),
        )
    ),
)
