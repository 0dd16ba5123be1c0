"""The ASGI application: routing, CORS, and errors as JSON. `access` says who may call which route.

Known routes of vLLM, OpenAI and similar servers that this server lacks are answered with 404 and a message that names
the alternative. OpenAI's client raises NotFoundError for a 404; it would retry a 501.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
import types
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from headrace.frontend.api.unsupported import ONLY_GENERATION
from headrace.frontend.http import ollama
from headrace.frontend.http.access import Access, Gate
from headrace.frontend.http.anthropic import answer as anthropic_answer
from headrace.frontend.http.connection import EXTENSION
from headrace.frontend.http.development import DEVELOPMENT_ROUTES, is_development
from headrace.frontend.http.errors import ApiError, shortened
from headrace.frontend.http.exchange import ClientGoneError, Exchange
from headrace.frontend.http.openai.generation import Receive, Scope, Send
from headrace.frontend.http.request_log import RequestLine
from headrace.frontend.http.route_spec import RouteSpec
from headrace.frontend.http.routes import ROUTES, ServerState
from headrace.frontend.http.scaling import SCALING_ROUTES
from headrace.frontend.text.guarded_tokenizer import is_panic
from headrace.ipc.failure import HeadraceError

_TEXT = "/v1/chat/completions and /v1/completions generate text"
_GENERATION = f"{ONLY_GENERATION}; {_TEXT}"
_EMBEDDINGS = "of vectors and scores, only embeddings are supported so far: POST /v1/embeddings"
_TEXT_ONLY = f"models read and write text alone; {_TEXT}"
_ADAPTERS = "LoRA adapters are not supported yet: merge one into the model's weights, and serve that"
_NOTHING_STORED = "this server keeps files, batches and responses, and nothing else between requests"
_RENDER = "POST /tokenize gives the tokens of a prompt, or of a conversation as the template renders it"

_GEMINI = f"Gemini's API is not served; {_TEXT}"

_OF_MODELS = ("pull", "push", "create", "copy", "delete", "blobs")
"""Routes by which Ollama downloads and manages models."""
_LONGEST_PATH = 200

REASONS: Mapping[str, str] = types.MappingProxyType(
    {
        "/v1/responses": "POST answers; a response is read, followed, cancelled and deleted by its id",
        "/v1/realtime": _TEXT_ONLY,
        "/v1/audio": _TEXT_ONLY,
        "/v1/images": _TEXT_ONLY,
        "/v1/videos": _TEXT_ONLY,
        **dict.fromkeys(("/v2/embed", "/pooling", "/classify", "/v1/classify"), _EMBEDDINGS),
        **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _EMBEDDINGS),
        **dict.fromkeys(("/v1/moderations", "/v1/fine_tuning"), _GENERATION),
        **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
        **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/conversations"), _NOTHING_STORED),
        **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), _RENDER),
        **dict.fromkeys(("/inference/v1/generate", "/generate", "/generate_stream"), _TEXT),
        **dict.fromkeys(("/api/embed", "/api/embeddings"), _EMBEDDINGS),
        **dict.fromkeys((f"/api/{name}" for name in _OF_MODELS), "what is served is chosen when the server starts"),
        "/api": "of Ollama's API there are chat, generate, show, tags, ps and version",
        **dict.fromkeys(("/v1beta", "/v1alpha", "/v1beta1"), _GEMINI),
        "/v1/messages/batches": "POST /v1/batches answers many requests, as OpenAI has them",
    }
)
_DEVELOPMENT = frozenset(route.path for route in DEVELOPMENT_ROUTES)


def not_found(path: str, served: Iterable[str]) -> ApiError:
    """The error for a path without a route. served: the paths of this server's routes; it may suggest one of them."""
    return _absent(path, _why(shortened(path, _LONGEST_PATH), tuple(served)))


def _absent(path: str, why: str) -> ApiError:
    return ApiError(404, f"there is no {shortened(path, _LONGEST_PATH)} here{why}", code="not_found")


def _reason_of(path: str, method: str) -> str | None:
    """Why a path is not served whose form is that of another route's, such as /v1/responses/{response_id}."""
    if path == "/v1/responses/compact" and method == "POST":
        return "conversations are not compacted; truncation: auto drops the oldest turns"
    if ":" in path.rpartition("/")[2] and path.startswith("/v1/models/"):
        return _GEMINI
    return None


def _why(path: str, served: tuple[str, ...]) -> str:
    plain = "/" + path.strip("/")
    for known, reason in REASONS.items():
        if plain == known or plain.startswith(known + "/"):
            return f": {reason}"
    if plain in _DEVELOPMENT:
        return ": it is one of the development routes, which --server-dev-mode serves"
    # Clients append paths to a base address that should end in /v1; it may lack /v1, or the path may repeat it.
    bare = plain
    while bare.startswith("/v1/"):
        bare = bare.removeprefix("/v1")
    meant = next((each for each in (f"/v1{bare}", bare) if each in served), None)
    if meant is not None:
        base = " The base address of OpenAI's clients ends in /v1." if meant.startswith("/v1") else ""
        return f"; did you mean {meant}?{base}"
    close = difflib.get_close_matches(plain, served, n=1)
    return f"; did you mean {close[0]}?" if close else "; GET /docs lists what there is"


_ERRORS_OF = types.MappingProxyType({"/api/": ollama.error_body, "/v1/messages/": anthropic_answer.error_body})
"""Encoders of errors for paths under these prefixes that have no route."""
logger = logging.getLogger(__name__)
EXCHANGE = "headrace.exchange"


def make_app(state: ServerState) -> Any:
    """The application for uvicorn."""
    options = state.options
    app: Any = App(state)
    if options.allowed_origins:
        app = _Cors(
            app,
            state.gate,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
    return app


class _Cors(CORSMiddleware):
    """Answers pages that ask which requests they may send, and lets those of allowed origins read the answers. What is
    for an unknown host is refused by the application."""

    def __init__(self, app: App, gate: Gate, **options: Any) -> None:
        super().__init__(app, **options)
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_unknown = self._gate.unknown_host(scope["headers"], scope["extensions"][EXTENSION]) is not None
        await (self.app if is_unknown else super().__call__)(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """A refusal is JSON, as other errors are."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < HTTPStatus.BAD_REQUEST:
            return answer
        message = (
            f"{bytes(answer.body).decode()}: the server's options --allowed-origins, --allowed-methods and "
            "--allowed-headers say which requests pages may send"
        )
        answer.body = ApiError(answer.status_code, message, code="origin").json()
        answer.headers["content-type"], answer.headers["content-length"] = "application/json", str(len(answer.body))
        return answer


class App:
    """Checks who asks, finds the route, runs its handler, and converts what it raises to an error response."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        served = (*ROUTES, *SCALING_ROUTES, *(DEVELOPMENT_ROUTES if is_development(state.options) else ()))
        self._gate = state.gate
        of_statistics = Access.CLIENT if state.options.guard_metrics else Access.PUBLIC
        state.routes = tuple(
            msgspec.structs.replace(spec, access=of_statistics) if spec.access is Access.STATISTICS else spec
            for spec in served
        )
        routes = [Route(spec.path, _Endpoint(spec, state), methods=_methods(spec)) for spec in state.routes]
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)
        self._specs = {spec.path: spec for spec in state.routes}
        self._public = frozenset(spec.path for spec in state.routes if spec.access is Access.PUBLIC)
        self._probes = frozenset(spec.path for spec in served if spec.access in (Access.PUBLIC, Access.STATISTICS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._state.options
        exchange = Exchange(scope, receive, send, options, self._state.bodies)
        scope[EXCHANGE] = exchange
        if scope["path"].endswith("/"):
            self._drop_slash(scope, options.root_path)
        self._set_form(exchange, scope["path"].removeprefix(options.root_path))
        # Set here, not by uvicorn, which would prepend it to the path: some proxies strip the prefix, others keep it.
        scope["root_path"] = options.root_path
        scope["app"] = self  # without it, Starlette answers a wrong method itself, in plain text
        began_s = time.monotonic()
        outcome = "done"
        line = RequestLine.begin() if options.enable_log_requests else None
        self._state.pages.in_flight(1)
        self._state.collector.busy(1)
        try:
            path = scope["path"].removeprefix(options.root_path)
            self._gate.check(exchange, is_public=path in self._public)
            await self._route(scope, receive, send)
        except ClientGoneError:
            outcome = "the client left"
            if (refusal := exchange.connection.refusal) is not None and not exchange.started:
                exchange.status, outcome = refusal.status, f"{refusal.status} {refusal}"
        except asyncio.CancelledError:  # the server ends before it is known what the answer will be
            outcome = "the server ended"
            if exchange.started or not self._state.refusing:
                raise
            await exchange.refuse(self._state.stopping())
        except BaseException as error:
            # A library's panic, and the exit of a plug-in, are no Exceptions.
            if not isinstance(error, Exception | SystemExit) and not is_panic(error):
                raise
            answer = _answer_to(error)
            outcome = f"{answer.status} {answer}"
            if not exchange.started:
                await exchange.refuse(answer)
            elif answer.status == 500:
                logger.exception("a response could not be finished")
        finally:
            del scope[EXCHANGE]
            exchange.close()
            self._state.pages.in_flight(-1)
            self._state.collector.busy(-1)
            path = scope["path"].removeprefix(options.root_path)
            self._state.pages.http_request(path, exchange.status, time.monotonic() - began_s)
            self._state.publish_counts()
            if line is not None:
                self._log(line, scope, exchange, outcome, time.monotonic() - began_s)

    def _log(self, line: RequestLine, scope: Scope, exchange: Exchange, outcome: str, duration_s: float) -> None:
        try:
            id = exchange.request_id()
        except ApiError:  # an invalid one
            id = "invalid"
        is_probe = scope["path"].removeprefix(self._state.options.root_path) in self._probes
        level = logging.DEBUG if is_probe else logging.INFO
        line.write(level, scope, id=id, status=exchange.status, outcome=outcome, duration_s=duration_s)

    def _drop_slash(self, scope: Scope, root_path: str) -> None:
        """A route's path may end in a slash, which clients add that join paths to a base address."""
        plain = scope["path"].removeprefix(root_path).rstrip("/")
        if plain and self._methods_of({**scope, "root_path": root_path, "path": root_path + plain}):
            scope["path"] = root_path + plain

    def _methods_of(self, scope: Scope) -> set[str]:
        """The methods of the routes with this path."""
        matching = [route for route in self._router.routes if route.matches(scope)[0] != Match.NONE]
        return {method for route in matching for method in getattr(route, "methods", None) or ()}

    def _set_form(self, exchange: Exchange, path: str) -> None:
        """Sets how errors are encoded and which content types are accepted for a path, also for one without a route."""
        if (spec := self._specs.get(path)) is not None:
            exchange.error_body, exchange.takes_any_type = spec.error_body, spec.takes_any_type
        elif (api := next((api for api in _ERRORS_OF if path.startswith(api)), None)) is not None:
            exchange.error_body = _ERRORS_OF[api]

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
                raise
            path = scope["path"].removeprefix(self._state.options.root_path)
            if (reason := _reason_of(path, scope["method"])) is not None:
                raise ApiError(
                    404, f"there is no {shortened(path, _LONGEST_PATH)} here: {reason}", code="not_found"
                ) from None
            methods = sorted(self._methods_of(scope))
            message = f"this route takes {', '.join(methods)}"
            raise ApiError(405, message, code="method_not_allowed", allow=methods) from None

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._state.options.root_path)
        raise not_found(path, [spec.path for spec in self._state.routes])


class _Endpoint:
    """Wraps a handler as the ASGI application that Starlette routes to."""

    def __init__(self, spec: RouteSpec, state: ServerState) -> None:
        self._spec, self._state = spec, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        if self._spec.access is Access.ADMIN:
            self._state.gate.check_admin(exchange)
        await self._spec.handler(self._state, exchange)


def _answer_to(error: BaseException) -> ApiError:
    if not isinstance(error, ApiError | HeadraceError) and not isinstance(error, asyncio.CancelledError):
        logger.error("a request failed", exc_info=error)
    return ApiError.of(error)


def _methods(spec: RouteSpec) -> list[str]:
    return [spec.method]
