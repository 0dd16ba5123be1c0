"""The ASGI application: routing, keys, cross-origin rules, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from headrace.frontend.http.development import DEVELOPMENT_ROUTES, is_development
from headrace.frontend.http.errors import ApiError
from headrace.frontend.http.exchange import ClientGoneError, Exchange
from headrace.frontend.http.generation import Receive, Scope, Send
from headrace.frontend.http.routes import ROUTES, RouteSpec
from headrace.frontend.http.state import ServerState
from headrace.frontend.http.unsupported_routes import not_found
from headrace.ipc.failure import HeadraceError
from headrace.ipc.log import printable

logger = logging.getLogger(__name__)
EXCHANGE = "headrace.exchange"


def make_app(state: ServerState) -> Any:
    """The application for uvicorn."""
    options = state.options
    app: Any = App(state)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
    return app


class App:
    """Checks the key, finds the route, runs its handler, and turns what it raises into an answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        state.routes = (*ROUTES, *DEVELOPMENT_ROUTES) if is_development(state.options) else ROUTES
        routes = [Route(spec.path, _Endpoint(spec, state), methods=_methods(spec)) for spec in state.routes]
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)
        self._public = frozenset(spec.path for spec in state.routes if spec.public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._state.options
        exchange = Exchange(scope, receive, send, options, self._state.bodies)
        scope[EXCHANGE] = exchange
        # Here and not in uvicorn, which would put it before the path: proxies take it off, others may leave it on.
        scope["root_path"] = options.root_path
        scope["app"] = self  # without it, Starlette answers a wrong method by itself
        began_s = time.monotonic()
        outcome = "done"
        self._state.pages.in_flight(1)
        try:
            self._check_key(exchange)
            await self._router(scope, receive, send)
        except ClientGoneError:
            outcome = "the client left"
        except Exception as error:
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
            path = scope["path"].removeprefix(options.root_path)
            self._state.pages.http_request(path, exchange.status, time.monotonic() - began_s)
            self._state.publish_counts()
            if options.enable_log_requests:
                path = printable(scope["path"])
                logger.info(
                    "%s %s: %s in %.3f s", scope["method"], path, printable(outcome), time.monotonic() - began_s
                )

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._state.options.root_path)
        raise not_found(path, [spec.path for spec in self._state.routes])

    def _check_key(self, exchange: Exchange) -> None:
        path = exchange.scope["path"].removeprefix(exchange.scope.get("root_path", ""))
        if not self._state.keys or path in self._public:
            return
        scheme, _, key = (exchange.header_bytes(b"authorization") or b"").partition(b" ")
        tenant = self._state.tenant_of(key.strip()) if scheme.lower() == b"bearer" else None
        if tenant is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        exchange.tenant = tenant


class _Endpoint:
    """A handler as the ASGI application that Starlette routes to."""

    def __init__(self, spec: RouteSpec, state: ServerState) -> None:
        self._handler, self._state = spec.handler, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._state, scope[EXCHANGE])


def _answer_to(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(error.status_code, f"this route takes {allowed}", code="method_not_allowed")
    if not isinstance(error, ApiError | HeadraceError) and not isinstance(error, asyncio.CancelledError):
        logger.error("a request failed", exc_info=error)
    return ApiError.of(error)


def _methods(spec: RouteSpec) -> list[str]:
    return [spec.method]
