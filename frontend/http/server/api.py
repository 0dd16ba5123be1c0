"""What an API declares to the server: `apis/<name>/routes.py` has it as `API`, or its routes alone as `ROUTES`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

import msgspec

from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.route_spec import RouteSpec

if TYPE_CHECKING:
    from headrace.frontend.http.server.state import ServerState

NONE: Mapping[str, str] = types.MappingProxyType({})


class ApiState:
    """What the handlers of an API share in one HTTP process; they get it by `ServerState.of`."""

    @classmethod
    def create(cls, state: ServerState) -> Self:
        """Called before the server listens. Raises OptionError."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called in the server's event loop, once it listens."""

    async def close(self) -> None:
        """Called when no request runs on the engines any more."""


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """One API: its routes, and what the server knows of it besides."""

    routes: tuple[RouteSpec, ...]
    states: tuple[type[ApiState], ...] = ()
    """Created before the server listens, so that options that they refuse end the start."""
    bodies: tuple[Body, ...] = ()
    """The kinds of requests whose fields the other APIs' requests know."""
    error_bodies: Mapping[str, Callable[[ApiError], bytes]] = types.MappingProxyType({})
    """By prefix of paths: encodes the errors of paths without a route."""
    not_served: Mapping[str, str] = NONE
    """Paths of known APIs that are not served, and why or what to use instead; also of what is below them."""
    not_routes: Mapping[str, str] = NONE
    """Patterns (fnmatch) of paths that have the form of a route, and why they are not served."""
    is_served: Callable[[ServeOptions], bool] = lambda options: True
    served_by: str = ""
    """What has to be set for the routes to be served, if not all servers have them."""
