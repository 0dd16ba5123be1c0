"""The part of Ollama's API that this server can serve: /api/chat, generate, embed, tags, show, ps and version.

A request that generates is converted to a chat completion, or with `raw` to a completion (`requests.py`), and runs as
one. The answer is one JSON object, or lines of JSON objects, of which the last has the counts:

    {"message": {"content": "Yes"}, "done": false} ... {"message": {"content": ""}, "done": true, "eval_count": 7}
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.anthropic.answer import call_input
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
from headrace.frontend.http.apis.openai.answer import AnswerContext, TextAnswer
from headrace.frontend.http.apis.openai.bodies import TokenLogprob, chat_logprobs
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.completions import prepare_completion
from headrace.frontend.http.apis.openai.requests import ChatCompletionRequest, CompletionRequest
from headrace.frontend.http.apis.pooling.pooled import PoolingContext
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.engines import engine_for, why_unavailable
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.event_stream import StreamForm
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import PreparedRequest, prepared_as
from headrace.frontend.http.server.route_spec import GENERATION, TOKENS, UNAVAILABLE, get, post
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.request.message import call_id
from headrace.frontend.request.outputs import CompletionOutput
from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.output_formats import ToolChoice
from headrace.frontend.text.formats.parser import OutputParser
from headrace.ipc.messages import Welcome

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients check that it is new enough for them."""
LINES = StreamForm([(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")], keep_alive=b"")
_ANY_TOOL = {"type": "function", "function": {"name": "any"}}

_STAYS = datetime.timedelta(days=100 * 365)
"""The reported time until a model is unloaded: so long that Ollama's clients show it as "forever"."""

# --- answers ----------------------------------------------------------------------------------------------------------


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: Any


class OllamaCall(msgspec.Struct):
    id: str
    function: OllamaFunction


class OllamaAnswerMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The whole answer, or a part of it; the last one also has counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[TokenLogprob] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatLine(OllamaLine):
    message: OllamaAnswerMessage


class OllamaGenerateLine(OllamaLine):
    response: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


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


class OllamaAnswer(TextAnswer):
    """Writes the response, whole or streamed, of a request with one output.

    A tool call is written once it is complete, since Ollama sends its arguments as an object.
    """

    form = LINES

    def __init__(self, context: AnswerContext, *, is_chat: bool, num_top_logprobs: int | None) -> None:
        """is_chat: write text within a message. num_top_logprobs: None if no log-probabilities were requested."""
        super().__init__(context)
        self._is_chat, self._num_top = is_chat, num_top_logprobs
        self._reader = self.reader() or OutputParser(None, None)
        self._call: tuple[AnswerPart, list[str]] | None = None
        """The tool call whose arguments are incomplete, and the parts of its arguments so far."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of tokens that have not been written yet."""

    def whole(self) -> list[bytes]:
        (stream,) = self.streams
        (sequence,) = stream.sequences
        output = sequence.read(delta=False, tokenizer=stream.tokenizer)
        told = OllamaAnswerMessage("assistant", "")
        for part in self._read(output):
            told.content += part.content
            told.thinking += part.thinking
            told.tool_calls = [*told.tool_calls, *part.tool_calls]
        return [msgspec.json.encode(self._line(told, output, sequence))]

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        lines = [self._line(part) for part in self._read(output)]
        if output.finish_reason is not None:
            lines.append(self._line(OllamaAnswerMessage("assistant", ""), output, sequence))
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        return b""

    def failure(self, error: BaseException) -> bytes:
        return error_body(ApiError.of(error)) + b"\n"

    def _read(self, output: CompletionOutput) -> list[OllamaAnswerMessage]:
        """The new output, each part of one kind: text, thinking or a tool call."""
        if output.logprobs is not None and self._num_top is not None:
            told = chat_logprobs(output.token_ids, output.logprobs, self.spell, self._num_top)
            self._logprobs += told.content
        ends = output.finish_reason is not None
        parts = []
        for event in self._reader.feed(output.text) + (
            self._reader.finish(output.finish_reason, output.stop_reason) if ends else []
        ):
            if event.call >= 0 and not event.name:
                assert self._call is not None, "its name came before"
                self._call[1].append(event.arguments)
                continue
            parts += self._complete_call()
            if event.name:
                self._call = event, [event.arguments]
            else:
                parts.append(OllamaAnswerMessage("assistant", event.content, thinking=event.reasoning))
        return parts + (self._complete_call() if ends else [])

    def _complete_call(self) -> list[OllamaAnswerMessage]:
        if self._call is None:
            return []
        (event, arguments), self._call = self._call, None
        function = OllamaFunction(event.name, call_input("".join(arguments)))
        return [OllamaAnswerMessage("assistant", "", tool_calls=[OllamaCall(call_id(event), function)])]

    def _line(
        self, part: OllamaAnswerMessage, output: CompletionOutput | None = None, sequence: SequenceState | None = None
    ) -> OllamaLine:
        """output and sequence: only for the last line, which has the counts."""
        line = _line(self.model, part, is_chat=self._is_chat)
        line.logprobs, self._logprobs = self._logprobs or None, []
        if output is not None and sequence is not None:
            (stream,) = self.streams
            total_s, first_s = stream.metrics.total_s or 0.0, stream.first_token_s or 0.0
            line.done, line.done_reason = True, output.finish_reason
            line.total_duration, line.load_duration = _nanoseconds(total_s), 0
            line.prompt_eval_count, line.prompt_eval_duration = (
                len(stream.prompt.token_ids or ()),
                _nanoseconds(first_s),
            )
            line.eval_count, line.eval_duration = len(sequence.token_ids), _nanoseconds(total_s - first_s)
        return line


def _line(model: str, part: OllamaAnswerMessage, *, is_chat: bool) -> OllamaLine:
    now = _time(datetime.datetime.now(datetime.UTC).timestamp())
    if is_chat:
        return OllamaChatLine(model=model, created_at=now, done=False, message=part)
    return OllamaGenerateLine(
        model=model,
        created_at=now,
        done=False,
        response=part.content,
        thinking=part.thinking,
        tool_calls=part.tool_calls,
    )


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def error_body(error: ApiError) -> bytes:
    """An error in Ollama's format."""
    return msgspec.json.encode({"error": error.body.message})


# --- routes -----------------------------------------------------------------------------------------------------------


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
    line = _line(request.model, OllamaAnswerMessage("assistant", ""), is_chat=is_chat)
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
    since = _time(state.started_at)
    models = [OllamaListedModel(modified_at=since, **_about(name, welcome)) for name, welcome in _served(state)]
    await exchange.answer(OllamaModels(models))


async def loaded(state: ServerState, exchange: Exchange) -> None:
    until = _time(state.started_at + _STAYS.total_seconds())
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
        return ShowResponse(OllamaDetails(), info, _capabilities(state, engine), _time(state.started_at))

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
