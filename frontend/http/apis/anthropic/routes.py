"""The routes of Anthropic's API: messages, the tokens of their prompts, and models in its form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.anthropic.answer import MessagesResponse, error_body
from headrace.frontend.http.apis.anthropic.messages import (
    NOT_SUPPORTED,
    CountTokensRequest,
    MessagesRequest,
    as_chat,
    prepare_messages,
)
from headrace.frontend.http.apis.openai.bodies import ModelCard
from headrace.frontend.http.apis.openai.chat import ChatParts, count_prompt
from headrace.frontend.http.apis.openai.requests import RANK_HEADER, take_rank
from headrace.frontend.http.apis.openai.routes import model_card, served_names
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.engines import engine_for
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, TOKENS, UNAVAILABLE, get, post
from headrace.frontend.http.server.state import ServerState


class CountTokensResponse(msgspec.Struct):
    input_tokens: int


class ClaudeModel(msgspec.Struct, tag_field="type", tag="model"):
    """A model in Anthropic's format."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"

    @classmethod
    def of(cls, card: ModelCard) -> ClaudeModel:
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return cls(card.id, card.id, created, card.max_model_len, card.max_model_len)


class ClaudeModels(msgspec.Struct):
    """All models, on one page."""

    data: list[ClaudeModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False

    @classmethod
    def of(cls, cards: Sequence[ModelCard]) -> ClaudeModels:
        ids = [card.id for card in cards]
        return cls([ClaudeModel.of(card) for card in cards], *((ids[0], ids[-1]) if ids else (None, None)))


async def messages(state: ServerState, exchange: Exchange) -> None:
    def prepare(request: MessagesRequest, engine: Engine, id: str) -> PreparedRequest:
        take_rank(request, exchange.header(RANK_HEADER))
        return prepare_messages(request, engine, id, state.of(ChatParts), exchange.tenant)

    await state.generate(exchange, lambda body: state.decoder.decode(body, MessagesRequest), prepare, "msg_")


async def count_tokens(state: ServerState, exchange: Exchange) -> None:
    def count(body: bytes) -> int:
        request = as_chat(state.decoder.decode(body, CountTokensRequest))
        state.check_accepting()
        return count_prompt(request, engine_for(state.pool, request.model), state.of(ChatParts))

    await exchange.answer(CountTokensResponse(await exchange.prepare(count)))


async def models(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(ClaudeModels.of([model_card(state, name) for name in served_names(state)]))


async def one_model(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(ClaudeModel.of(model_card(state, exchange.scope["path_params"]["model"])))


_VERSION = b"anthropic-version"
"""A header that Anthropic's clients send. Its API and OpenAI's have the same paths of models."""
_get = functools.partial(get, access=Access.CLIENT, header=_VERSION, error_body=error_body)
_post = functools.partial(post, access=Access.CLIENT, error_body=error_body)
ROUTES = (
    _post(
        "/v1/messages",
        messages,
        "Anthropic's API: complete a conversation with the next message",
        MessagesRequest,
        MessagesResponse,
        GENERATION,
    ),
    _post(
        "/v1/messages/count_tokens",
        count_tokens,
        "Anthropic's API: count the tokens of a conversation",
        CountTokensRequest,
        CountTokensResponse,
        TOKENS,
    ),
    _get("/v1/models", models, "Anthropic's API: list the served models", ClaudeModels, refusals=UNAVAILABLE),
    _get(
        "/v1/models/{model:path}",
        one_model,
        "Anthropic's API: describe a served model",
        ClaudeModel,
        refusals=(404, *UNAVAILABLE),
    ),
)
API = Api(
    routes=ROUTES,
    bodies=(
        Body(kind=MessagesRequest, called="Anthropic's messages", lacks=NOT_SUPPORTED),
        Body(
            kind=CountTokensRequest, called="Anthropic's counts of tokens", lacks=NOT_SUPPORTED, counts=MessagesRequest
        ),
    ),
    error_bodies={"/v1/messages/": error_body},
    not_served={"/v1/messages/batches": "POST /v1/batches answers many requests, in OpenAI's form"},
)
