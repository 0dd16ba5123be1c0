"""SageMaker's one route: what a body asks for follows from its fields and from what the model does."""

from __future__ import annotations

from typing import Any

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.completions import prepare_completion
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, CompletionRequest
from headrace.frontend.http.apis.openai.routes import generate
from headrace.frontend.http.apis.pooling.embeddings import EmbeddingRequest, PoolingRequest
from headrace.frontend.http.apis.pooling.routes import PREPARES, prepare_texts
from headrace.frontend.http.apis.pooling.scores import ClassifyRequest, RerankRequest, ScoreRequest
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, post
from headrace.frontend.http.server.state import ServerState
from headrace.ipc.messages import Welcome

_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
"""Header of SageMaker's inference components, which names a LoRA adapter."""
_GENERATES: dict[str, type[Any]] = {"messages": ChatCompletionRequest, "prompt": CompletionRequest}
_SCORES: dict[str, type[Any]] = {
    **dict.fromkeys(("queries", "text_1", "data_1"), ScoreRequest),
    **dict.fromkeys(("query", "documents"), RerankRequest),
}


def kinds_of(welcome: Welcome) -> dict[str, type[Any]]:
    """The kinds of requests that a model answers, by a field of each."""
    kinds = dict(_GENERATES) if welcome.generates else {}
    if welcome.pooling is None:
        return kinds
    tasks = welcome.pooling.kinds
    of_texts = EmbeddingRequest if "embed" in tasks else ClassifyRequest if "classify" in tasks else PoolingRequest
    return {"messages": of_texts, **kinds, "input": of_texts, **_SCORES}


async def invocations(state: ServerState, exchange: Exchange) -> None:
    """Chat completions, completions, embeddings, classes, scores or rerankings, by the body's fields."""
    adapter = exchange.header(_ADAPTER)

    def decode(body: bytes) -> Any:
        request = state.decoder.decode_one_of(body, kinds_of(engine_for(state.pool, None).connected.welcome))
        request.model = adapter or request.model
        return request

    def prepare(request: Any, engine: Engine, id: str, parts: ChatParts, tenant: str) -> PreparedRequest:
        if isinstance(request, ChatCompletionRequest):
            return prepare_chat(request, engine, f"chatcmpl-{id}", parts, tenant)
        if isinstance(request, CompletionRequest):
            return prepare_completion(request, engine, f"cmpl-{id}", parts, tenant)
        prefix, prepare_pooled = PREPARES[type(request)]
        return prepare_texts(prepare_pooled, request, engine, f"{prefix}{id}", state, tenant)

    await generate(state, exchange, decode=decode, prepare=prepare)


ROUTES = (
    post(
        "/invocations",
        invocations,
        "SageMaker: what the body's fields and the model say: messages, prompt, input, queries, or query and documents",
        None,
        None,
        GENERATION,
        access=Access.CLIENT,
    ),
)
