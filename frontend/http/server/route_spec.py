"""The declaration of a route, from which the server routes requests and the OpenAPI document is generated."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.exchange import Exchange

if TYPE_CHECKING:
    from headrace.frontend.http.server.state import ServerState

_PATH_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
GENERATION = (400, 404, 413, 415, 429, 500, 503, 504)
TOKENS = (400, 404, 413, 415, 503)
UNAVAILABLE = (503,)
"""Refusals of routes that generate, that read or count a prompt's tokens, and that need an engine."""
Handler = Callable[["ServerState", Exchange], Awaitable[None]]


class RouteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One route: its handler, and its description for the OpenAPI document."""

    method: str
    path: str
    handler: Handler
    summary: str
    access: Access
    """Who may call it. Without a default, so that every new route, or its room for all of a kind, says it."""
    request: Any = None
    form: Mapping[str, Any] | None = None
    """The JSON schema of a multipart/form-data body; None for other bodies."""
    query: Any = None
    """The struct of the query parameters."""
    response: Any = None
    """The type of the JSON response; None if the response is not JSON."""
    events: Any = None
    """The struct of a stream's events, if they are JSON."""
    header: bytes | None = None
    """Set for a route that answers only requests with this header, in place of another API's route of the same path."""
    error_body: Callable[[ApiError], bytes] = ApiError.json
    """Encodes the route's errors as a response body."""
    refusals: tuple[int, ...] = ()
    """HTTP statuses of the errors that the route may answer with, besides 401 and 403 of keys."""
    is_documented: bool = True
    """Whether the OpenAPI document has it: files of a page are no part of an API."""
    takes_any_type: bool = False
    """A JSON body is accepted without its content type, unless a web page sends it."""

    @property
    def shown_path(self) -> str:
        """The path for a reader: a parameter is its name alone."""
        return _PATH_PARAMETER.sub(r"{\1}", self.path)

    @property
    def path_parameters(self) -> list[str]:
        """The names of the path's parameters."""
        return [match.group(1) for match in _PATH_PARAMETER.finditer(self.path)]


def route(
    method: str, path: str, handler: Handler, summary: str, response: Any = None, *, access: Access, **more: Any
) -> RouteSpec:
    return RouteSpec(
        method=method, path=path, handler=handler, summary=summary, response=response, access=access, **more
    )


get = functools.partial(route, "GET")


def post(
    path: str,
    handler: Handler,
    summary: str,
    request: Any,
    response: Any,
    refusals: Any = (),
    *,
    access: Access,
    **more: Any,
) -> RouteSpec:
    return route("POST", path, handler, summary, response, request=request, refusals=refusals, access=access, **more)
