"""The handlers of the routes, and the state that the handlers of one HTTP process share.

The server's routing and the OpenAPI document derive from ROUTES, the table at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

import headrace
from headrace.frontend.client.client import CoreClient
from headrace.frontend.fleet.pool import Engine, EnginePool
from headrace.frontend.fleet.scaling import Scaler
from headrace.frontend.http import ollama
from headrace.frontend.http.access import Access, Gate, Keys
from headrace.frontend.http.anthropic.answer import MessagesResponse, error_body
from headrace.frontend.http.anthropic.messages import (
    ClaudeModel,
    ClaudeModels,
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    as_chat,
    prepare_messages,
)
from headrace.frontend.http.errors import ApiError, bad_field, unavailable
from headrace.frontend.http.exchange import Exchange, LargeBodies
from headrace.frontend.http.files import handlers as files_api
from headrace.frontend.http.files.batches import FilesState
from headrace.frontend.http.known_fields import OTHERS
from headrace.frontend.http.load_report import LOAD_FORMAT_HEADER, load_headers
from headrace.frontend.http.metrics import Exposition, Pages
from headrace.frontend.http.openai.bodies import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfoResponse,
    VersionResponse,
)
from headrace.frontend.http.openai.chat import ChatParts, count_prompt, prepare_chat
from headrace.frontend.http.openai.chat_batch import prepare_chat_batch
from headrace.frontend.http.openai.completions import prepare_completion
from headrace.frontend.http.openai.decoder import RequestDecoder
from headrace.frontend.http.openai.embeddings import EmbeddingRequest, EmbeddingResponse, prepare_embedding
from headrace.frontend.http.openai.event_stream import KeepAlive
from headrace.frontend.http.openai.generation import Generator, PreparedRequest
from headrace.frontend.http.openai.prompts import (
    MOST_TRUNCATED,
    apply_server_defaults,
    tokenize_texts,
)
from headrace.frontend.http.openai.requests import (
    RANK_HEADER,
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
    take_rank,
)
from headrace.frontend.http.openai.tool_choice import check_tools
from headrace.frontend.http.process.engines import engine_for, why_unavailable
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.responses_api import handlers as responses_api
from headrace.frontend.http.responses_api.create import ResponseParts
from headrace.frontend.http.responses_api.handlers import (
    DeletedResponse,
    InputItemList,
    InputItemsQuery,
    InputTokens,
    ResponsesState,
    RetrieveQuery,
)
from headrace.frontend.http.responses_api.run import ResponseObject
from headrace.frontend.http.route_spec import RouteSpec, get, post
from headrace.ipc.process.gc_pauses import IdleCollector


class ServerState:
    """State that all handlers of one HTTP process share. The process creates it once, before it serves."""

    def __init__(
        self,
        options: ServeOptions,
        pool: EnginePool,
        pages: Pages,
        *,
        keys: Keys,
        template: str | None,
    ) -> None:
        """template: the option chat_template's, if set."""
        self.options, self.pool, self.pages = options, pool, pages
        self.gate = Gate(keys, options)
        self.decoder = RequestDecoder(strict=options.strict_requests, others=OTHERS)
        self.bodies = LargeBodies(options.max_body_bytes, len(keys.tenants))
        self.collector = IdleCollector()
        self.chat = ChatParts.of(options, template, trusts_requests=options.trust_request_chat_template)
        self.responses = ResponsesState(
            options.response_store,
            options.response_store_bytes,
            options.tool_server,
            strict=options.strict_requests,
            tenants=keys.tenants,
        )
        self.files = FilesState(options.file_store, options.file_store_bytes, len(keys.tenants))
        self.exposition = Exposition(pages, pool, options.metrics_prefix)
        self.generator = Generator(
            KeepAlive(options.sse_keep_alive), options.request_timeout, pages, pool, self.bodies.threads
        )
        own = self.responses
        self.response_parts = ResponseParts(
            own.store, own.tool_servers, own.left_out, self.chat, self.generator, self.bodies
        )
        self.routes: Sequence[RouteSpec] = ()
        """The routes that are served; set by the application."""
        self.why_fixed = ""
        """Why the number of engines is fixed, if there is no scaler."""
        self.draining = False
        """Set when the server begins to stop. It is not ready, takes no new connections, and answers what comes over
        those that there are."""
        self.refusing = False
        """Set when the server ends: the time that running requests had is over."""
        self.scaler: Scaler | None = None
        """Changes the number of engines; None if it is fixed or the engines are not the server's own."""
        self.num_scaling = 0
        self.started_at = int(time.time())

    def check_accepting(self) -> None:
        """Raises ApiError (503) if the server accepts no new requests."""
        if self.refusing:
            raise self.stopping()

    def stopping(self) -> ApiError:
        """A 503 that says why the server ends."""
        if self.pool.dead.is_set():
            return why_unavailable(self.pool)
        return unavailable("the server is shutting down and takes no new requests", code="shutting_down")

    def publish_counts(self) -> None:
        """Copies the counts of the engine pool and the router to this process's page of metrics."""
        self.pages.set("tokens_after_disconnect", self.pool.num_late_tokens())
        for kind, counts in self.pool.router.counts().items():
            for reason, count in counts.items():
                self.pages.set(f"router_{kind}/{reason}", count)


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def completions(state: ServerState, exchange: Exchange) -> None:
    await _generate(state, exchange, lambda body: state.decoder.decode(body, CompletionRequest))


async def chat_completions(state: ServerState, exchange: Exchange) -> None:
    await _generate(state, exchange, lambda body: state.decoder.decode(body, ChatCompletionRequest))


async def chat_batch(state: ServerState, exchange: Exchange) -> None:
    def prepare(body: bytes) -> PreparedRequest:
        request = state.decoder.decode(body, ChatBatchRequest)
        apply_server_defaults(request, state.options)
        take_rank(request, exchange.header(RANK_HEADER))
        name = exchange.request_id(request.request_id)
        state.check_accepting()
        return prepare_chat_batch(request, engine_for(state.pool, request.model), state.chat, name, exchange.tenant)

    prepared = await exchange.prepare(prepare)
    await state.generator.answer(prepared, exchange.connection, exchange.receive, exchange.send)


async def messages(state: ServerState, exchange: Exchange) -> None:
    """POST /v1/messages: Anthropic's API."""

    def prepare(body: bytes) -> PreparedRequest:
        request = state.decoder.decode(body, MessagesRequest)
        take_rank(request, exchange.header(RANK_HEADER))
        name = exchange.request_id(request.request_id)
        state.check_accepting()
        return prepare_messages(request, engine_for(state.pool, request.model), state.chat, name, exchange.tenant)

    prepared = await exchange.prepare(prepare)
    await state.generator.answer(prepared, exchange.connection, exchange.receive, exchange.send)


async def embeddings(state: ServerState, exchange: Exchange) -> None:
    def prepare(body: bytes) -> PreparedRequest:
        request = state.decoder.decode(body, EmbeddingRequest)
        name = exchange.request_id(request.request_id)
        state.check_accepting()
        engine = engine_for(state.pool, request.model)
        return prepare_embedding(request, engine, state.options, name, exchange.tenant)

    prepared = await exchange.prepare(prepare)
    await state.generator.answer(prepared, exchange.connection, exchange.receive, exchange.send)


async def count_tokens(state: ServerState, exchange: Exchange) -> None:
    def count(body: bytes) -> int:
        request = as_chat(state.decoder.decode(body, CountTokensRequest))
        state.check_accepting()
        return count_prompt(request, engine_for(state.pool, request.model), state.chat)

    await exchange.answer(CountTokensResponse(await exchange.prepare(count)))


async def invocations(state: ServerState, exchange: Exchange) -> None:
    """SageMaker's only route: a chat completion if the body has messages, a completion if it has a prompt."""
    kinds: dict[str, type[Any]] = {"messages": ChatCompletionRequest, "prompt": CompletionRequest}
    await _generate(state, exchange, lambda body: state.decoder.decode_one_of(body, kinds))


async def _generate(
    state: ServerState, exchange: Exchange, decode: Callable[[bytes], ChatCompletionRequest | CompletionRequest]
) -> None:
    def prepare(body: bytes) -> PreparedRequest:
        request = decode(body)
        apply_server_defaults(request, state.options)
        take_rank(request, exchange.header(RANK_HEADER))
        name = exchange.request_id(request.request_id)
        state.check_accepting()
        engine = engine_for(state.pool, request.model)
        if isinstance(request, ChatCompletionRequest):
            return prepare_chat(request, engine, state.chat, name, exchange.tenant)
        return prepare_completion(request, engine, state.chat, name, exchange.tenant)

    prepared = await exchange.prepare(prepare)
    form = exchange.header(LOAD_FORMAT_HEADER)
    if form is not None and not prepared.streams:
        exchange.headers_at_start = lambda: load_headers(prepared.engine, form)
    await state.generator.answer(prepared, exchange.connection, exchange.receive, exchange.send)


async def models(state: ServerState, exchange: Exchange) -> None:
    cards = [_card(state, name) for name in _names(state)]
    await exchange.answer(ClaudeModels.of(cards) if _is_claudes(exchange) else ModelList("list", cards))


def _is_claudes(exchange: Exchange) -> bool:
    """Whether Anthropic's API is meant: it shares the paths of models with OpenAI's, but its clients send a version."""
    return exchange.header_bytes(b"anthropic-version") is not None


async def one_model(state: ServerState, exchange: Exchange) -> None:
    name = exchange.scope["path_params"]["model"]
    if _is_claudes(exchange):
        exchange.error_body = error_body
    if name not in _names(state):
        raise ApiError(404, f"the model {name!r:.200} does not exist", param="model", code="model_not_found")
    card = _card(state, name)
    await exchange.answer(ClaudeModel.of(card) if _is_claudes(exchange) else card)


async def tokenize(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(
        await exchange.prepare(lambda body: _tokens_of(state, state.decoder.decode(body, TokenizeRequest)))
    )


def _tokens_of(state: ServerState, request: TokenizeRequest) -> bytes:
    client = _client_of(state, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if request.messages is not None:
        check_tools(request.tools)
        prompt = state.chat.prompts.render(
            request,
            request.messages,
            client.tokenizer,
            tools=request.tools or None,
            enable_thinking=request.enable_thinking,
            reasoning_effort=request.reasoning_effort,
            verbosity=request.verbosity,
            documents=request.documents,
        )
        text, special = prompt.text, False
    else:
        text, special = request.prompt or "", True
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    most = MOST_TRUNCATED * client.welcome.max_model_len
    (tokens,) = tokenize_texts([text], client.tokenizer, special=special, max_tokens=most, param="prompt")
    spelt = client.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs and client.tokenizer else None
    return msgspec.json.encode(TokenizeResponse(len(tokens), client.welcome.max_model_len, list(tokens), spelt))


async def detokenize(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(
        await exchange.prepare(lambda body: _text_of(state, state.decoder.decode(body, DetokenizeRequest)))
    )


def _text_of(state: ServerState, request: DetokenizeRequest) -> bytes:
    client = _client_of(state, request.model)
    if client.tokenizer is None:
        raise bad_field("tokens", "this engine runs without a tokenizer")
    size, most = client.welcome.vocab_size, client.welcome.max_model_len
    if len(request.tokens) > most:
        raise bad_field("tokens", f"{len(request.tokens)} tokens; the model takes at most {most}")
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < size:
            raise bad_field(f"tokens[{index}]", f"tokens[{index}] is {token_id}; token ids are 0 to {size - 1}")
    return msgspec.json.encode(DetokenizeResponse(client.tokenizer.decode(request.tokens)))


def _client_of(state: ServerState, model: str | None) -> CoreClient:
    client = engine_for(state.pool, model).client
    assert client is not None, "an engine is chosen among those that are connected"
    return client


async def tokenizer_info(state: ServerState, exchange: Exchange) -> None:
    if not state.options.enable_tokenizer_info_endpoint:
        raise ApiError(404, "this server was started without --enable-tokenizer-info-endpoint")
    client = engine_for(state.pool, None).client
    assert client is not None
    if client.tokenizer is None:
        raise ApiError(404, "this engine runs without a tokenizer")
    tokenizer = client.tokenizer
    special = {
        name: tokenizer.special_tokens_map.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    template = tokenizer.get_chat_template() if tokenizer.chat_template_names else None
    await exchange.answer(
        TokenizerInfoResponse(type(tokenizer).__name__, client.welcome.max_model_len, template, **special)
    )


async def version(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(VersionResponse(headrace.__version__))


async def load(state: ServerState, exchange: Exchange) -> None:
    # This request itself is not counted: it puts no load on the engine.
    await exchange.answer(LoadResponse(state.pages.total_in_flight() - 1))


async def metrics(state: ServerState, exchange: Exchange) -> None:
    state.publish_counts()
    await exchange.answer_text(await state.exposition.text(), METRICS_TYPE)


async def health(state: ServerState, exchange: Exchange) -> None:
    """200 while at least one engine is connected and not silent."""
    if not state.pool.answers:
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def live(state: ServerState, exchange: Exchange) -> None:
    """200 unless only a restart of the server helps: 503 once every engine is lost and none will come back."""
    if state.pool.dead.is_set():
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def ready(state: ServerState, exchange: Exchange) -> None:
    """200 while the server accepts new connections."""
    if state.draining:
        raise state.stopping()
    if not state.pool.answers:
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def progress(state: ServerState, exchange: Exchange) -> None:
    """200 while tokens arrive or no requests are queued. 503 if an engine with requests gives no token for
    progress_timeout (and is not paused), or an idle one does not answer."""
    limit_s = state.options.progress_timeout
    for engine in state.pool.engines:
        if engine.client is None:
            continue
        if len(engine.client.requests):
            oldest_s = max(engine.client.last_step_s, engine.busy_since_s)
            silent_s = time.monotonic() - oldest_s
            if silent_s > limit_s and not await _is_paused(engine):
                raise unavailable(
                    f"engine {engine.index} has requests and gave no token for {silent_s:.1f} s", code="no_progress"
                )
        elif await engine.stats(min(limit_s, 5.0)) is None and engine.client is not None:
            raise unavailable(f"engine {engine.index} does not answer", code="no_progress")
    if not state.pool.usable:
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def _is_paused(engine: Engine) -> bool:
    stats = await engine.stats()
    return stats is not None and stats.paused


async def openapi(state: ServerState, exchange: Exchange) -> None:
    from headrace.frontend.http.openapi import document

    await exchange.answer(document(state.routes, state.options.root_path, keys=state.gate.keys))


async def docs(state: ServerState, exchange: Exchange) -> None:
    from headrace.frontend.http.openapi import docs_page, document

    page = docs_page(document(state.routes, state.options.root_path, keys=state.gate.keys), state.pool.names)
    await exchange.answer_text(page.encode(), "text/html; charset=utf-8")


def _names(state: ServerState) -> list[str]:
    """The names of the served models. Raises ApiError if none is known yet."""
    if not state.pool.names:
        raise why_unavailable(state.pool)
    return state.pool.names


def _card(state: ServerState, name: str) -> ModelCard:
    serving = [engine for engine in state.pool.engines if name in engine.names and engine.client is not None]
    if not serving:
        raise why_unavailable(state.pool)
    assert serving[0].client is not None
    welcome = serving[0].client.welcome
    return ModelCard(
        id=name,
        object="model",
        created=state.started_at,
        owned_by="headrace",
        root=welcome.model,
        parent=None,
        max_model_len=welcome.max_model_len,
        default_sampling_params=welcome.generation_defaults,
    )


_GENERATION = (400, 404, 413, 415, 429, 500, 503, 504)
_TOKENS = (400, 404, 413, 415, 503)
_UNAVAILABLE = (int(HTTPStatus.SERVICE_UNAVAILABLE),)


ROUTES: tuple[RouteSpec, ...] = (
    post(
        "/v1/completions",
        completions,
        "Continue prompts",
        CompletionRequest,
        CompletionResponse,
        _GENERATION,
        access=Access.CLIENT,
    ),
    post(
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        ChatCompletionRequest,
        ChatResponse,
        _GENERATION,
        access=Access.CLIENT,
    ),
    post(
        "/v1/chat/completions/batch",
        chat_batch,
        "Answer several conversations at once",
        ChatBatchRequest,
        ChatResponse,
        _GENERATION,
        access=Access.CLIENT,
    ),
    post(
        "/v1/embeddings",
        embeddings,
        "Vectors of texts",
        EmbeddingRequest,
        EmbeddingResponse,
        _GENERATION,
        access=Access.CLIENT,
    ),
    post(
        "/v1/messages",
        messages,
        "Answer a conversation, as Anthropic has it",
        MessagesRequest,
        MessagesResponse,
        _GENERATION,
        error_body=error_body,
        access=Access.CLIENT,
    ),
    post(
        "/v1/messages/count_tokens",
        count_tokens,
        "The tokens of a conversation, as Anthropic has it",
        CountTokensRequest,
        CountTokensResponse,
        _TOKENS,
        error_body=error_body,
        access=Access.CLIENT,
    ),
    post(
        "/v1/responses",
        responses_api.create,
        "Answer, with items that may be stored and followed",
        ResponsesRequest,
        ResponseObject,
        (*_GENERATION, 424),
        access=Access.CLIENT,
    ),
    post(
        "/v1/responses/input_tokens",
        responses_api.input_tokens,
        "The tokens that a response would begin with",
        ResponsesRequest,
        InputTokens,
        (*_TOKENS, 424),
        access=Access.CLIENT,
    ),
    get(
        "/v1/responses/{response_id}",
        responses_api.retrieve,
        "A stored response",
        ResponseObject,
        query=RetrieveQuery,
        refusals=(400, 404),
        access=Access.CLIENT,
    ),
    RouteSpec(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=responses_api.delete,
        summary="Forget a stored response",
        response=DeletedResponse,
        refusals=(404,),
        access=Access.CLIENT,
    ),
    RouteSpec(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=responses_api.cancel,
        summary="End a response that is generated in the background",
        response=ResponseObject,
        refusals=(400, 404),
        access=Access.CLIENT,
    ),
    get(
        "/v1/responses/{response_id}/input_items",
        responses_api.input_items,
        "What a stored response was asked with",
        InputItemList,
        query=InputItemsQuery,
        refusals=(400, 404),
        access=Access.CLIENT,
    ),
    *files_api.ROUTES,
    *ollama.ROUTES,
    RouteSpec(
        method="POST",
        path="/invocations",
        handler=invocations,
        summary="Either of them, as the body has messages or a prompt; SageMaker's route",
        refusals=_GENERATION,
        access=Access.CLIENT,
    ),
    get("/v1/models", models, "The models that are served", ModelList, refusals=_UNAVAILABLE, access=Access.CLIENT),
    get(
        "/v1/models/{model:path}",
        one_model,
        "One of them",
        ModelCard,
        refusals=(404, *_UNAVAILABLE),
        access=Access.CLIENT,
    ),
    post(
        "/tokenize",
        tokenize,
        "A text's or a conversation's tokens",
        TokenizeRequest,
        TokenizeResponse,
        _TOKENS,
        access=Access.CLIENT,
    ),
    post(
        "/detokenize",
        detokenize,
        "The text of tokens",
        DetokenizeRequest,
        DetokenizeResponse,
        _TOKENS,
        access=Access.CLIENT,
    ),
    get(
        "/tokenizer_info",
        tokenizer_info,
        "Special tokens and chat template",
        TokenizerInfoResponse,
        refusals=(404, *_UNAVAILABLE),
        access=Access.CLIENT,
    ),
    get("/version", version, "This server's version", VersionResponse, access=Access.STATISTICS),
    get("/load", load, "Requests in progress", LoadResponse, access=Access.CLIENT),
    get("/metrics", metrics, "Metrics in Prometheus' text format", access=Access.STATISTICS),
    get("/health", health, "Whether an engine serves", HealthResponse, refusals=_UNAVAILABLE, access=Access.PUBLIC),
    get("/health/live", live, "Whether this server lives", HealthResponse, refusals=_UNAVAILABLE, access=Access.PUBLIC),
    get(
        "/health/ready", ready, "Whether it takes requests", HealthResponse, refusals=_UNAVAILABLE, access=Access.PUBLIC
    ),
    get(
        "/health/progress", progress, "Whether tokens come", HealthResponse, refusals=_UNAVAILABLE, access=Access.PUBLIC
    ),
    get("/ping", health, "The same as /health", HealthResponse, refusals=_UNAVAILABLE, access=Access.PUBLIC),
    RouteSpec(
        method="POST",
        path="/ping",
        handler=health,
        summary="The same as /health",
        response=HealthResponse,
        refusals=_UNAVAILABLE,
        access=Access.PUBLIC,
    ),
    get("/openapi.json", openapi, "This API as an OpenAPI document", access=Access.CLIENT),
    get("/docs", docs, "This API as a page to read", access=Access.CLIENT),
)
