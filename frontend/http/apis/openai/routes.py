"""The routes of OpenAI's completions, chat completions and models, and of vLLM's tokenizer."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.frontend.client.engine_metrics import kv_use
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.bodies import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.chat_batch import prepare_chat_batch
from headrace.frontend.http.apis.openai.completions import prepare_completion
from headrace.frontend.http.apis.openai.parameters import apply_server_defaults
from headrace.frontend.http.apis.openai.prompts import MOST_TRUNCATED, tokenize_texts
from headrace.frontend.http.apis.openai.requests import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    RANK_HEADER,
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
    take_rank,
)
from headrace.frontend.http.apis.openai.tool_choice import check_tools
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.engines import engine_for, why_unavailable
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, TOKENS, UNAVAILABLE, get, post
from headrace.frontend.http.server.state import ServerState

_LOAD_FORMAT, _LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
"""Headers of ORCA (Open Request Cost Aggregation), by which load balancers such as Envoy ask for the engine's load."""
_LOAD_TIMEOUT_S = 0.5


async def generate(
    state: ServerState,
    exchange: Exchange,
    *,
    prepare: Callable[..., PreparedRequest],
    kind: type[Any] = CompletionRequest,
    decode: Callable[[bytes], Any] | None = None,
    prefix: str = "",
) -> None:
    """Answers by generating, unless `decode` makes a request of another kind, which `prepare` answers as it likes.

    prepare: with the arguments of `prepare_chat`. kind: of the request, unless `decode` makes it. prefix: of the
    response's id."""

    def decoded(body: bytes) -> Any:
        request = state.decoder.decode(body, kind) if decode is None else decode(body)
        if isinstance(request, GenerationFields):
            apply_server_defaults(request, state.options)
            if RANK_HEADER in exchange.headers:
                take_rank(request, exchange.header(RANK_HEADER))
        return request

    prepare = functools.partial(prepare, parts=state.of(ChatParts), tenant=exchange.tenant)
    if _LOAD_FORMAT in exchange.headers:
        prepare = _telling_load(exchange, prepare)
    await state.generate(exchange, decoded, prepare, prefix)


def _telling_load(exchange: Exchange, prepare: Callable[..., PreparedRequest]) -> Callable[..., PreparedRequest]:
    """`prepare`, for a response whose headers tell the engine's load, unless it is streamed."""
    form = exchange.header(_LOAD_FORMAT) or ""

    def prepare_telling(request: Any, engine: Engine, id: str) -> PreparedRequest:
        if not request.stream:
            exchange.headers_at_start = lambda: _load_headers(engine, form)
        return prepare(request, engine, id)

    return prepare_telling


async def _load_headers(engine: Engine, form: str) -> list[tuple[bytes, bytes]]:
    """The header; none for a format other than TEXT and JSON, or if the engine does not answer in time."""
    stats = await engine.stats(_LOAD_TIMEOUT_S) if form.upper() in ("TEXT", "JSON") else None
    if stats is None:
        return []
    told = {"kv_cache_usage_perc": round(kv_use(stats), 6), "num_requests_waiting": stats.num_waiting}
    if form.upper() == "JSON":
        text = "JSON " + json.dumps({"named_metrics": told})
    else:
        text = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in told.items())
    return [(_LOAD, text.encode())]


# --- models -----------------------------------------------------------------------------------------------------------


async def models(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(ModelList("list", [model_card(state, name) for name in served_names(state)]))


async def one_model(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(model_card(state, exchange.scope["path_params"]["model"]))


def served_names(state: ServerState) -> list[str]:
    """The names of the served models and adapters. Raises ApiError if none is known yet."""
    if not state.pool.names:
        raise why_unavailable(state.pool)
    return [*state.pool.names, *state.pool.adapters]


def model_card(state: ServerState, name: str) -> ModelCard:
    """Raises ApiError for a model that is not served."""
    if name not in served_names(state):
        raise ApiError(404, f"the model {name!r:.200} does not exist", param="model", code="model_not_found")
    adapter = None if name in state.pool.names else state.pool.adapters.get(name)
    base = name if adapter is None else state.pool.adapters.base_of(name)
    serving = [engine for engine in state.pool.engines if base in engine.names and engine.client is not None]
    if not serving:
        raise why_unavailable(state.pool)
    welcome = serving[0].connected.welcome
    return ModelCard(
        id=name,
        object="model",
        created=state.started_at,
        owned_by="headrace",
        root=welcome.model if adapter is None else adapter.path,
        parent=None if adapter is None else adapter.base_model_name or base,
        max_model_len=welcome.max_model_len,
        default_sampling_params=welcome.generation_defaults,
    )


# --- the tokenizer ----------------------------------------------------------------------------------------------------


async def tokenize(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(
        await exchange.prepare(lambda body: _tokens_of(state, state.decoder.decode(body, TokenizeRequest)))
    )


def _tokens_of(state: ServerState, request: TokenizeRequest) -> bytes:
    client = engine_for(state.pool, request.model).connected
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if request.messages is not None:
        check_tools(request.tools)
        prompt = state.of(ChatParts).prompts.render(
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
    client = engine_for(state.pool, request.model).connected
    if client.tokenizer is None:
        raise bad_field("tokens", "this engine runs without a tokenizer")
    size, most = client.welcome.vocab_size, client.welcome.max_model_len
    if len(request.tokens) > most:
        raise bad_field("tokens", f"{len(request.tokens)} tokens; the model takes at most {most}")
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < size:
            raise bad_field(f"tokens[{index}]", f"tokens[{index}] is {token_id}; token ids are 0 to {size - 1}")
    return msgspec.json.encode(DetokenizeResponse(client.tokenizer.decode(request.tokens)))


async def tokenizer_info(state: ServerState, exchange: Exchange) -> None:
    if not state.options.enable_tokenizer_info_endpoint:
        raise ApiError(404, "this server was started without --enable-tokenizer-info-endpoint")
    client = engine_for(state.pool, None).connected
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


# --- what there is ----------------------------------------------------------------------------------------------------

_get, _post = functools.partial(get, access=Access.CLIENT), functools.partial(post, access=Access.CLIENT)
ROUTES = (
    _post(
        "/v1/completions",
        functools.partial(generate, kind=CompletionRequest, prepare=prepare_completion, prefix="cmpl-"),
        "Complete one or several prompts",
        CompletionRequest,
        CompletionResponse,
        GENERATION,
    ),
    _post(
        "/v1/chat/completions",
        functools.partial(generate, kind=ChatCompletionRequest, prepare=prepare_chat, prefix="chatcmpl-"),
        "Complete a conversation with the next message",
        ChatCompletionRequest,
        ChatResponse,
        GENERATION,
        events=ChatChunk,
    ),
    _post(
        "/v1/chat/completions/batch",
        functools.partial(generate, kind=ChatBatchRequest, prepare=prepare_chat_batch, prefix="chatcmpl-"),
        "Complete several conversations in one request",
        ChatBatchRequest,
        ChatResponse,
        GENERATION,
    ),
    _get("/v1/models", models, "List the served models", ModelList, refusals=UNAVAILABLE),
    _get("/v1/models/{model:path}", one_model, "Describe a served model", ModelCard, refusals=(404, *UNAVAILABLE)),
    _post(
        "/tokenize",
        tokenize,
        "Tokenize a text, or a conversation as the chat template renders it",
        TokenizeRequest,
        TokenizeResponse,
        TOKENS,
    ),
    _post("/detokenize", detokenize, "Convert token ids to text", DetokenizeRequest, DetokenizeResponse, TOKENS),
    _get(
        "/tokenizer_info",
        tokenizer_info,
        "Show the special tokens and the chat template; needs --enable-tokenizer-info-endpoint",
        TokenizerInfoResponse,
        refusals=(404, *UNAVAILABLE),
    ),
)

_TEXT = "/v1/chat/completions and /v1/completions generate text"
_NO_SUCH_TASK = f"models generate and pool, and neither judge nor train here; {_TEXT}"
_TEXT_ONLY = f"models read and write text only; {_TEXT}"
_WHOLE_TEXT = {"skip_special_tokens": Neutral("the text has special tokens too", (False,))}
_NOTHING_STORED = "this server stores files, batches and responses, and nothing else between requests"
_RENDER = "POST /tokenize returns the tokens of a prompt, or of a conversation as the chat template renders it"
_DESCRIBED = "GET /v1/models describes the models, and GET /metrics what runs"
_GEMINI = f"Gemini's API is not served; {_TEXT}"
_NOT_SERVED = types.MappingProxyType(
    {
        **dict.fromkeys(("/v1/realtime", "/v1/audio", "/v1/images", "/v1/videos"), _TEXT_ONLY),
        **dict.fromkeys(("/v1/moderations", "/v1/fine_tuning"), _NO_SUCH_TASK),
        **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/conversations"), _NOTHING_STORED),
        **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), _RENDER),
        **dict.fromkeys(("/inference/v1/generate", "/generate", "/generate_stream"), _TEXT),
        **dict.fromkeys(("/v1beta", "/v1alpha", "/v1beta1"), _GEMINI),
        **dict.fromkeys(("/completion", "/v1/engines", "/v1/complete"), _TEXT),
        "/infill": "filling in the middle is not supported",
        "/apply-template": _RENDER,
        "/flush_cache": "POST /reset_prefix_cache does that, with --server-dev-mode",
        **dict.fromkeys(("/props", "/slots", "/get_model_info", "/v1/internal/model/info"), _DESCRIBED),
    }
)
"""Paths of OpenAI's and vLLM's APIs, and of those of TGI, Gemini, llama.cpp, SGLang and text-generation-webui."""

API = Api(
    routes=ROUTES,
    states=(ChatParts,),
    bodies=(
        Body(kind=CompletionRequest, called="completions", lacks=COMPLETION_NEUTRAL),
        Body(kind=ChatCompletionRequest, called="chat completions", lacks=CHAT_NEUTRAL),
        Body(kind=ChatBatchRequest, called="batches of chats", lacks=CHAT_NEUTRAL),
        Body(kind=TokenizeRequest, called="requests to tokenize", counts=ChatCompletionRequest),
        Body(kind=DetokenizeRequest, called="requests to detokenize", lacks=_WHOLE_TEXT, foreign="last"),
    ),
    not_served=_NOT_SERVED,
    not_routes={"/v1/models/*:*": _GEMINI},
)
