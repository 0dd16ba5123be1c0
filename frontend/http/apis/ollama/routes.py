"""The part of Ollama's API that this server can serve: /api/chat, generate, embed, tags, show, ps and version.

A request that generates is converted to a chat completion, or with `raw` to a completion (`requests.py`), and runs as
one; `answer.py` writes what it made in Ollama's form.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.ollama.answer import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatLine,
    OllamaGenerateLine,
    OllamaLine,
    error_body,
    line_of,
    time_text,
)
from headrace.frontend.http.apis.ollama.embeddings import (
    EMBED_NEUTRAL,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    prepare_embed,
    prepare_embeddings,
)
from headrace.frontend.http.apis.ollama.requests import (
    NOT_SUPPORTED,
    OWN_NAMES,
    OWN_NAMES_OF_COMPLETION,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    ShowRequest,
    as_chat,
    as_completion,
    served_name,
)
from headrace.frontend.http.apis.openai.answer import AnswerContext
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.completions import prepare_completion
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, CompletionRequest
from headrace.frontend.http.apis.pooling.pooled import PoolingContext
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.engines import engine_for, why_unavailable
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest, prepared_as
from headrace.frontend.http.server.route_spec import GENERATION, TOKENS, UNAVAILABLE, get, post
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.output_formats import ToolChoice
from headrace.ipc.messages import Welcome

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients check that it is new enough for them."""
_ANY_TOOL = {"type": "function", "function": {"name": "any"}}

_STAYS = datetime.timedelta(days=100 * 365)
"""The reported time until a model is unloaded: so long that Ollama's clients show it as "forever"."""


class OllamaDetails(msgspec.Struct):
    """Unknown values stay empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    digest: str
    """SHA-256 of the model's name and version: it changes with the weights."""
    details: OllamaDetails
    size: int = 0


class OllamaListedModel(OllamaModel):
    modified_at: str


class OllamaLoadedModel(OllamaModel):
    expires_at: str
    context_length: int
    size_vram: int = 0


class OllamaModels(msgspec.Struct):
    models: list[OllamaListedModel]


class OllamaLoadedModels(msgspec.Struct):
    models: list[OllamaLoadedModel]


class OllamaVersion(msgspec.Struct):
    version: str


class ShowResponse(msgspec.Struct):
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


async def chat(state: ServerState, exchange: Exchange) -> None:
    def prepare(body: bytes) -> PreparedRequest | OllamaLine:
        request = state.decoder.decode(body, OllamaChatRequest)
        engine = _engine(state, request.model)
        if not request.messages:
            return _loaded(request, is_chat=True)
        return _prepare(state, exchange, request, as_chat(request, request.messages, request.tools, engine), engine)

    await _answer(state, exchange, await exchange.prepare(prepare))


async def generate(state: ServerState, exchange: Exchange) -> None:
    def prepare(body: bytes) -> PreparedRequest | OllamaLine:
        request = state.decoder.decode(body, OllamaGenerateRequest)
        engine = _engine(state, request.model)
        for name in ("suffix", "template", "context", "images"):
            if getattr(request, name):
                raise bad_field(name, f"{name} is not supported", "unsupported_parameter")
        if not request.prompt:
            return _loaded(request, is_chat=False)
        if request.raw:
            return _prepare(state, exchange, request, as_completion(request, engine), engine)
        messages = [OllamaMessage(role="user", content=request.prompt)]
        if request.system:
            messages.insert(0, OllamaMessage(role="system", content=request.system))
        return _prepare(state, exchange, request, as_chat(request, messages, None, engine), engine)

    await _answer(state, exchange, await exchange.prepare(prepare))


def _engine(state: ServerState, model: str) -> Engine:
    state.check_accepting()
    return engine_for(state.pool, served_name(model, (*state.pool.names, *state.pool.adapters)))


def _loaded(request: OllamaRequest, *, is_chat: bool) -> OllamaLine:
    """Answers a request without a prompt, by which clients load the model (no effect) or unload it (refused)."""
    if request.keep_alive in (0, "0", "0s"):
        raise bad_field("keep_alive", "keep_alive is 0; the model of this server stays loaded", "unsupported_parameter")
    line = line_of(request.model, OllamaAnswerMessage("assistant", ""), is_chat=is_chat)
    line.done, line.done_reason = True, "load"
    return line


def _prepare(
    state: ServerState,
    exchange: Exchange,
    request: OllamaRequest,
    asked: ChatCompletionRequest | CompletionRequest,
    engine: Engine,
) -> PreparedRequest:
    id, num_top = f"ollama-{exchange.request_id(None)}", (request.top_logprobs or 0) if request.logprobs else None
    make_answer = functools.partial(
        OllamaAnswer, is_chat=isinstance(request, OllamaChatRequest), num_top_logprobs=num_top
    )
    parts = state.of(ChatParts)
    if isinstance(asked, ChatCompletionRequest):
        return prepared_as(OWN_NAMES, lambda: prepare_chat(asked, engine, id, parts, exchange.tenant, make_answer))
    prepared = prepared_as(
        OWN_NAMES_OF_COMPLETION,
        # OpenAI's default is 16 tokens; Ollama has no limit.
        lambda: prepare_completion(asked, engine, id, parts, exchange.tenant, default_max_tokens=None),
    )
    prepared.answer = make_answer(AnswerContext(asked, id, engine, state.options))
    return prepared


async def _embed(state: ServerState, exchange: Exchange, *, kind: type[Any], prepare: Callable[..., Any]) -> None:
    """prepare: makes what is run, or the answer, of a request of this kind, as `prepare_embed` does."""

    def prepared(body: bytes) -> PreparedRequest | msgspec.Struct:
        request = state.decoder.decode(body, kind)
        engine = _engine(state, request.model)
        name = served_name(request.model, (*state.pool.names, *state.pool.adapters))
        context = PoolingContext(f"ollama-{exchange.request_id(None)}", exchange.tenant, model=name)
        made: PreparedRequest | msgspec.Struct = prepare(request, engine, state.options, context)
        return made

    await _answer(state, exchange, await exchange.prepare(prepared))


async def _answer(state: ServerState, exchange: Exchange, prepared: PreparedRequest | msgspec.Struct) -> None:
    if isinstance(prepared, PreparedRequest):
        await state.generator.answer(prepared, exchange)
    else:
        await exchange.answer(prepared)


async def tags(state: ServerState, exchange: Exchange) -> None:
    since = time_text(state.started_at)
    models = [OllamaListedModel(modified_at=since, **_about(name, welcome)) for name, welcome in _served(state)]
    await exchange.answer(OllamaModels(models))


async def loaded(state: ServerState, exchange: Exchange) -> None:
    until = time_text(state.started_at + _STAYS.total_seconds())
    models = [
        OllamaLoadedModel(expires_at=until, context_length=welcome.max_model_len, **_about(name, welcome))
        for name, welcome in _served(state)
    ]
    await exchange.answer(OllamaLoadedModels(models))


def _served(state: ServerState) -> list[tuple[str, Welcome]]:
    """The served models. Raises ApiError if none is there."""
    adapters = state.pool.adapters
    bases = [(name, name) for name in state.pool.names] + [(name, adapters.base_of(name)) for name in adapters]
    serving = ((name, state.pool.serving(base)) for name, base in bases)
    found = [(name, engine.client.welcome) for name, engine in serving if engine is not None and engine.client]
    if not found:
        raise why_unavailable(state.pool)
    return found


def _about(name: str, welcome: Welcome) -> dict[str, Any]:
    version = f"{welcome.model}\0{welcome.model_version}".encode()
    return {"name": name, "model": name, "digest": hashlib.sha256(version).hexdigest(), "details": OllamaDetails()}


async def show(state: ServerState, exchange: Exchange) -> None:
    def find(body: bytes) -> ShowResponse:
        request = state.decoder.decode(body, ShowRequest)
        asked = request.model or request.name
        if asked is None:
            raise bad_field("model", "model is required", "missing_required_parameter")
        engine = _engine(state, asked)
        length = engine.connected.welcome.max_model_len
        info: dict[str, str | int] = {"general.architecture": "headrace", "headrace.context_length": length}
        return ShowResponse(OllamaDetails(), info, _capabilities(state, engine), time_text(state.started_at))

    await exchange.answer(await exchange.prepare(find))


def _capabilities(state: ServerState, engine: Engine) -> list[str]:
    """What the model can do: tools and thinking only if this server parses its output for them."""
    client = engine.connected
    tokenizer, welcome = client.tokenizer, client.welcome
    embeds = welcome.pooling is not None and "embed" in welcome.pooling.kinds
    if not welcome.generates:
        return ["embedding"] if embeds else []
    template = None if tokenizer is None else state.of(ChatParts).prompts.template(tokenizer, tools=[_ANY_TOOL])
    if template is None:
        return ["completion", *(["embedding"] if embeds else [])]
    formats = state.of(ChatParts).formats.of(RenderedChat("", template), ToolChoice([_ANY_TOOL]))
    reads = {
        "tools": formats.calls is not None or formats.reads_channels_calls,
        "thinking": formats.reading is not None or formats.channels is not None,
        "embedding": embeds,
    }
    return ["completion", *(name for name, is_read in reads.items() if is_read)]


async def version(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(OllamaVersion(API_VERSION))


async def root(state: ServerState, exchange: Exchange) -> None:
    """GET /, by which Ollama's own command checks that the server runs."""
    await exchange.answer_text(b"Headrace is running", "text/plain; charset=utf-8")


_get = functools.partial(get, access=Access.CLIENT, error_body=error_body)
_post = functools.partial(post, access=Access.CLIENT, error_body=error_body, takes_any_type=True)
ROUTES = (
    _post(
        "/api/chat",
        chat,
        "Ollama's API: complete a conversation with the next message",
        OllamaChatRequest,
        OllamaChatLine,
        GENERATION,
    ),
    _post(
        "/api/generate",
        generate,
        "Ollama's API: complete a prompt",
        OllamaGenerateRequest,
        OllamaGenerateLine,
        GENERATION,
    ),
    _post("/api/show", show, "Ollama's API: describe a model and its capabilities", ShowRequest, ShowResponse, TOKENS),
    _post(
        "/api/embed",
        functools.partial(_embed, kind=OllamaEmbedRequest, prepare=prepare_embed),
        "Ollama's API: compute the embedding vectors of texts",
        OllamaEmbedRequest,
        OllamaEmbedResponse,
        GENERATION,
    ),
    _post(
        "/api/embeddings",
        functools.partial(_embed, kind=OllamaEmbeddingsRequest, prepare=prepare_embeddings),
        "Ollama's API: compute the embedding vector of a text",
        OllamaEmbeddingsRequest,
        OllamaEmbeddingsResponse,
        GENERATION,
    ),
    _get("/api/tags", tags, "Ollama's API: list the served models", OllamaModels, refusals=UNAVAILABLE),
    _get("/api/ps", loaded, "Ollama's API: list the loaded models", OllamaLoadedModels, refusals=UNAVAILABLE),
    _get("/api/version", version, "Ollama's API: show the version of Ollama whose API this is", OllamaVersion),
    get("/", root, "Ollama's API: a text that says that the server runs", access=Access.PUBLIC),
)
_HINT = "Ollama's requests have options"
_OF_MODELS = ("pull", "push", "create", "copy", "delete", "blobs")
"""Routes by which Ollama downloads and manages models."""
API = Api(
    routes=ROUTES,
    bodies=(
        Body(kind=OllamaChatRequest, called="Ollama's chats", lacks=NOT_SUPPORTED, foreign="refused", hint=_HINT),
        Body(
            kind=OllamaGenerateRequest,
            called="Ollama's completions",
            lacks=NOT_SUPPORTED,
            foreign="refused",
            hint=_HINT,
        ),
        *(
            Body(
                kind=kind,
                called="Ollama's embeddings",
                lacks={**NOT_SUPPORTED, **EMBED_NEUTRAL},
                foreign="refused",
                hint=_HINT,
            )
            for kind in (OllamaEmbedRequest, OllamaEmbeddingsRequest)
        ),
    ),
    error_bodies={"/api/": error_body},
    not_served={
        **dict.fromkeys((f"/api/{name}" for name in _OF_MODELS), "the served model is chosen when the server starts"),
        "/api": "of Ollama's API, chat, generate, embed, show, tags, ps and version are served",
    },
)
