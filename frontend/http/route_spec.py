"""How a route is declared: what the server routes by, and what the OpenAPI document is made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.frontend.http.errors import ApiError
from headrace.frontend.http.exchange import Exchange

if TYPE_CHECKING:
    from headrace.frontend.http.routes import ServerState

Handler = Callable[["ServerState", Exchange], Awaitable[None]]


class RouteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One route, as it is served and as it is described."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: Any = None
    form: Mapping[str, Any] | None = None
    """The JSON schema of a body that is multipart/form-data."""
    query: Any = None
    """A struct of what may follow the ? of the address."""
    response: Any = None
    """A struct; None for what is no JSON."""
    public: bool = False
    """Answers without a key."""
    tells_of_use: bool = False
    """A public one that wants the key too with the option guard_metrics."""
    error_body: Callable[[ApiError], bytes] = ApiError.json
    """How its errors are written."""
    refusals: tuple[int, ...] = ()
    """Statuses of errors that it may answer with."""
    takes_any_type: bool = False
    """JSON without its content type is taken from clients that are no web pages."""


def get(path: str, handler: Handler, summary: str, response: Any = None, **more: Any) -> RouteSpec:
    return RouteSpec(method="GET", path=path, handler=handler, summary=summary, response=response, **more)


def post(
    path: str, handler: Handler, summary: str, request: Any, response: Any, refusals: Any, **more: Any
) -> RouteSpec:
    return RouteSpec(
        method="POST",
        path=path,
        handler=handler,
        summary=summary,
        request=request,
        response=response,
        refusals=refusals,
        **more,
    )
