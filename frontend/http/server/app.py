"""The ASGI application: routing, CORS, and errors as JSON. `access` says who may call which route.

Known routes of vLLM, OpenAI and similar servers that this server lacks are answered with 404 and a message that names
the alternative. OpenAI's client raises NotFoundError for a 404; it would retry a 501.
"""

from __future__ import annotations

import asyncio
import difflib
import fnmatch
import logging
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from headrace.frontend.http.server.access import Access, AccessControl
from headrace.frontend.http.server.connection import EXTENSION
from headrace.frontend.http.server.errors import ApiError, shortened
from headrace.frontend.http.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from headrace.frontend.http.server.request_log import RequestLine
from headrace.frontend.http.server.route_spec import RouteSpec
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.text.guarded_tokenizer import is_panic
from headrace.frontend.tracing.tracer import CONTEXT_HEADERS
from headrace.ipc.failure import HeadraceError

_LONGEST_PATH = 200


logger = logging.getLogger(__name__)
EXCHANGE = "headrace.exchange"


def make_app(state: ServerState) -> Any:
    """The application for uvicorn."""
    options = state.options
    app: Any = App(state)
    if options.allowed_origins:
        app = _Cors(
            app,
            state.access,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
    return app


class _Cors(CORSMiddleware):
    """Answers pages that ask which requests they may send, and lets those of allowed origins read the answers. What is
    for an unknown host is refused by the application."""

    def __init__(self, app: App, access: AccessControl, **options: Any) -> None:
        super().__init__(app, **options)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_unknown = self._access.unknown_host(scope, scope["extensions"][EXTENSION]) is not None
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
        served = tuple(route for api in state.apis for route in api.routes)
        self._access = state.access
        of_statistics = Access.CLIENT if state.options.guard_metrics else Access.PUBLIC
        state.routes = tuple(
            msgspec.structs.replace(spec, access=of_statistics) if spec.access is Access.STATISTICS else spec
            for spec in served
        )
        variants = [spec for spec in state.routes if spec.header is not None]
        endpoints = [(spec, _Endpoint(spec, variants, state)) for spec in state.routes if spec.header is None]
        routes = [Route(spec.path, endpoint, methods=[spec.method]) for spec, endpoint in endpoints]
        plain = [each for each in endpoints if "{" not in each[0].path]
        # Of routes with the same path, the first one answers.
        self._endpoints = {(spec.method, spec.path): endpoint for spec, endpoint in reversed(plain)}
        """Of paths without parameters, which need no search through the routes' regular expressions."""
        state.pages.count_handlers((spec.method, spec.shown_path) for spec in state.routes if spec.is_documented)
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)
        self._specs = {spec.path: spec for spec in state.routes if spec.header is None}
        self._error_bodies = {prefix: body for api in state.apis for prefix, body in api.error_bodies.items()}
        self._missing = _Missing(state)
        self._public = frozenset(spec.path for spec in state.routes if spec.access is Access.PUBLIC)
        self._guarded = frozenset(
            (spec.method, spec.path) for spec in state.routes if spec.access in (Access.CLIENT, Access.ADMIN)
        )
        """A path may be public for one method alone."""
        self._probes = frozenset(spec.path for spec in served if spec.access in (Access.PUBLIC, Access.STATISTICS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._state.options
        exchange = Exchange(scope, receive, send, options, self._state.bodies, self._state.finder)
        path = self._begin(exchange, scope)
        began_s = time.monotonic()
        outcome = "done"
        line = RequestLine.begin() if options.enable_log_requests else None
        if self._state.tracer is not None:
            told = {name: exchange.header(name.encode()) for name in CONTEXT_HEADERS}
            self._state.tracer.begin({name: value for name, value in told.items() if value is not None})
        self._state.pages.in_flight(1)
        self._state.collector.busy(1)
        try:
            is_public = path in self._public and (scope["method"], path) not in self._guarded
            self._let_in(scope, exchange, is_public=is_public)
            if (endpoint := self._endpoints.get((scope["method"], path))) is not None:
                scope["endpoint"] = endpoint
                await endpoint(scope, receive, send)
            else:
                await self._search(path, scope, receive, send)
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
            endpoint = scope.get("endpoint") or self._matching(scope)
            handler = endpoint.handler if isinstance(endpoint, _Endpoint) else None
            self._state.pages.http_request(handler, exchange.status, time.monotonic() - began_s)
            self._state.publish_counts()
            if line is not None:
                self._log(line, scope, exchange, outcome, time.monotonic() - began_s)

    def _let_in(self, scope: Scope, exchange: Exchange, *, is_public: bool) -> None:
        """Raises ApiError (401, 403), to be encoded as the route that would answer encodes its errors."""
        try:
            self._access.check(exchange, is_public=is_public)
        except ApiError:
            if isinstance(endpoint := self._matching(scope), _Endpoint):
                endpoint.chosen(exchange)
            raise

    def _log(self, line: RequestLine, scope: Scope, exchange: Exchange, outcome: str, duration_s: float) -> None:
        try:
            id = exchange.request_id()
        except ApiError:  # an invalid one
            id = "invalid"
        is_probe = scope["path"].removeprefix(self._state.options.root_path) in self._probes
        level = logging.DEBUG if is_probe else logging.INFO
        line.write(level, scope, id=id, status=exchange.status, outcome=outcome, duration_s=duration_s)

    def _matching(self, scope: Scope) -> Any:
        """The endpoint of a request that was not let through, so that Starlette's router has not come to it."""
        found = (route for route in self._router.routes if route.matches(scope)[0] == Match.FULL)
        return next((getattr(route, "endpoint", None) for route in found), None)

    def _drop_slash(self, scope: Scope, root_path: str) -> None:
        """A route's path may end in a slash, which clients add that join paths to a base address."""
        plain = scope["path"].removeprefix(root_path).rstrip("/")
        if plain and self._methods_of({**scope, "root_path": root_path, "path": root_path + plain}):
            scope["path"] = root_path + plain

    def _methods_of(self, scope: Scope) -> set[str]:
        """The methods of the routes with this path."""
        matching = [route for route in self._router.routes if route.matches(scope)[0] != Match.NONE]
        return {method for route in matching for method in getattr(route, "methods", None) or ()}

    def _begin(self, exchange: Exchange, scope: Scope) -> str:
        """The path without root_path. Sets how errors are encoded and which content types are accepted for it, also if
        it has no route."""
        scope[EXCHANGE] = exchange
        root_path = self._state.options.root_path
        if scope["path"] == root_path:
            scope["path"] += "/"
        elif scope["path"].endswith("/"):
            self._drop_slash(scope, root_path)
        # Set here, not by uvicorn, which would prepend it to the path: some proxies strip the prefix, others keep it.
        scope["root_path"] = root_path
        scope["app"] = self  # without it, Starlette answers a wrong method itself, in plain text
        path: str = scope["path"].removeprefix(root_path)
        if (spec := self._specs.get(path)) is not None:
            exchange.error_body, exchange.takes_any_type = spec.error_body, spec.takes_any_type
        elif (prefix := next(filter(path.startswith, self._error_bodies), None)) is not None:
            exchange.error_body = self._error_bodies[prefix]
        return path

    async def _search(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """For a path that is not one of a route without parameters; path: without root_path."""
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
                raise
            if (missing := self._missing.mistaken(path)) is not None:
                raise missing from None
            methods = sorted(self._methods_of(scope))
            message = f"this route takes {', '.join(methods)}"
            raise ApiError(405, message, code="method_not_allowed", allow=methods) from None

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise self._missing.error(scope["path"].removeprefix(self._state.options.root_path))


class _Endpoint:
    """Wraps a handler as the ASGI application that Starlette routes to."""

    def __init__(self, spec: RouteSpec, variants: Iterable[RouteSpec], state: ServerState) -> None:
        """variants: routes that answer requests with a header, of which some may have this path."""
        self._spec, self._state = spec, state
        self.handler = (spec.method, spec.shown_path)
        self._variants = [each for each in variants if (each.method, each.path) == (spec.method, spec.path)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        spec = self.chosen(exchange)
        if spec.access is Access.ADMIN:
            self._state.access.check_admin(exchange)
        await spec.handler(self._state, exchange)

    def chosen(self, exchange: Exchange) -> RouteSpec:
        """The route that answers a request with these headers. Sets how its errors are encoded."""
        spec = self._spec
        for each in self._variants:
            if each.header in exchange.headers:
                spec, exchange.error_body = each, each.error_body
        return spec


class _Missing:
    """Tells why a path is not served, or which one may be meant."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._not_served = {path: why for api in state.apis for path, why in api.not_served.items()}
        self._not_routes = {pattern: why for api in state.apis for pattern, why in api.not_routes.items()}
        for api in state.unserved_apis:
            self._not_served |= {route.path: f"it needs {api.served_by}" for route in api.routes}

    def mistaken(self, path: str) -> ApiError | None:
        """The error for a path that has the form of a route, but is known to be none of this server's."""
        why = next((why for pattern, why in self._not_routes.items() if fnmatch.fnmatchcase(path, pattern)), None)
        return None if why is None else _not_found(path, f": {why}")

    def error(self, path: str) -> ApiError:
        """The error for a path without a route."""
        return _not_found(path, self._why(shortened(path, _LONGEST_PATH)))

    def _why(self, path: str) -> str:
        plain = "/" + path.strip("/")
        known = plain
        while known:
            if known in self._not_served:
                return f": {self._not_served[known]}"
            known = known.rpartition("/")[0]
        served = [spec.path for spec in self._state.routes if spec.is_documented]
        # Clients append paths to a base address that should end in /v1; it may lack /v1, or the path may repeat it.
        bare = plain
        while bare.startswith("/v1/"):
            bare = bare.removeprefix("/v1")
        meant = next((each for each in (f"/v1{bare}", bare) if each in served), None)
        if meant is not None:
            base = " The base address of OpenAI's clients ends in /v1." if meant.startswith("/v1") else ""
            return f"; did you mean {meant}?{base}"
        close = difflib.get_close_matches(plain, served, n=1)
        return f"; did you mean {close[0]}?" if close else "; GET /docs lists the routes of this server"


def _not_found(path: str, why: str) -> ApiError:
    return ApiError(404, f"there is no {shortened(path, _LONGEST_PATH)} here{why}", code="not_found")


def _answer_to(error: BaseException) -> ApiError:
    if not isinstance(error, ApiError | HeadraceError) and not isinstance(error, asyncio.CancelledError):
        logger.error("a request failed", exc_info=error)
    return ApiError.of(error)
