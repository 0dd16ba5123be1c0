"""The APIs of the server, one room each (see README.md), found by folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.decoder import Others
from headrace.frontend.http.server.decoding.known_fields import others_of

_FIRST = ("openai", "responses")


def found() -> tuple[Api, ...]:
    """All APIs. OpenAI's come first: errors tell of a field by the first API that has it, and the others' requests have
    many of OpenAI's fields."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(load(name) for name in sorted(names, key=lambda name: name not in _FIRST))


def load(name: str) -> Api:
    routes = importlib.import_module(f"{__name__}.{name}.routes")
    api: Api = getattr(routes, "API", None) or Api(routes=routes.ROUTES)
    return api


@functools.cache
def known_fields() -> Others:
    """By kind of request of all APIs, the fields that it lacks and what they mean there."""
    return others_of([body for api in found() for body in api.bodies])
