"""The routes of the server, as its rooms of APIs declare them."""

from __future__ import annotations

from headrace.frontend.http.apis import found
from headrace.frontend.http.apis.development.routes import ROUTES as DEVELOPMENT_ROUTES
from headrace.frontend.http.apis.scaling.routes import ROUTES as SCALING_ROUTES
from headrace.frontend.http.server.openapi import document
from headrace.frontend.http.server.route_spec import RouteSpec

BODIES = tuple(body for api in found() for body in api.bodies)
ALL_ROUTES = tuple(route for api in found() for route in api.routes)
ROUTES = tuple(route for route in ALL_ROUTES if route not in (*SCALING_ROUTES, *DEVELOPMENT_ROUTES))
"""Those that change no server."""


def document_of(*routes: RouteSpec) -> bytes:
    return document(routes, "", bodies=BODIES)
