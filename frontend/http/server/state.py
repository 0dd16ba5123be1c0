"""The state that the handlers of one HTTP process share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.scaling import Scaler
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import AccessControl, Keys
from headrace.frontend.http.server.adapters import AdapterFinder
from headrace.frontend.http.server.api import Api, ApiState
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.decoding.known_fields import Body, others_of
from headrace.frontend.http.server.engines import engine_for, why_unavailable
from headrace.frontend.http.server.errors import ApiError, unavailable
from headrace.frontend.http.server.event_stream import KeepAlive
from headrace.frontend.http.server.exchange import Exchange, LargeBodies
from headrace.frontend.http.server.generation import Generator, PreparedRequest
from headrace.frontend.http.server.metrics import Exposition, Pages
from headrace.frontend.http.server.route_spec import RouteSpec
from headrace.frontend.tracing.tracer import Tracer
from headrace.ipc.process.gc_pauses import IdleCollector

S = TypeVar("S", bound=ApiState)


class GeneratingRequest(Protocol):
    """The fields of a request's body that the server itself reads."""

    @property
    def model(self) -> str | None: ...
    @property
    def request_id(self) -> str | None: ...


R = TypeVar("R", bound=GeneratingRequest)


class ServerState:
    """Created once by each process, before it serves."""

    def __init__(
        self,
        options: ServeOptions,
        pool: EnginePool,
        pages: Pages,
        apis: Sequence[Api],
        *,
        keys: Keys,
        template: str | None,
        tracer: Tracer | None = None,
    ) -> None:
        """template: the option chat_template's, if set. tracer: exports a trace of each request; None: nobody asked for
        traces. Raises OptionError for options that an API refuses."""
        self.options, self.pool, self.pages, self.keys, self.template = options, pool, pages, keys, template
        self.tracer = tracer
        self.apis = [api for api in apis if api.is_served(options)]
        self.unserved_apis = [api for api in apis if not api.is_served(options)]
        self.bodies_of_apis: list[Body] = [body for api in apis for body in api.bodies]
        self.access = AccessControl(keys, options)
        self.decoder = RequestDecoder(strict=options.strict_requests, others=others_of(self.bodies_of_apis))
        self.bodies = LargeBodies(options.max_body_bytes, len(keys.tenants))
        self.collector = IdleCollector()
        self.finder = AdapterFinder(pool, options)
        self.exposition = Exposition(pages, pool, options.metrics_prefix, options.show_hidden_metrics_for_version)
        self.generator = Generator(
            KeepAlive(options.sse_keep_alive), options.request_timeout, pages, pool, self.bodies.threads
        )
        self.routes: Sequence[RouteSpec] = ()
        """The routes that are served; set by the application."""
        self.why_fixed = ""
        """Why the number of engines is fixed, if there is no scaler."""
        self.draining = False
        """Set when the server begins to stop. It is not ready, takes no new connections, and answers what comes over
        those that there are."""
        self.refusing = False
        """Set when the server ends: the time that running requests had is over."""
        self.scaler: Scaler | None = None
        """Changes the number of engines; None if it is fixed or the engines are not the server's own."""
        self.num_scaling = 0
        self.started_at = int(time.time())
        self._states: dict[type[ApiState], Any] = {}
        for api in self.apis:
            for kind in api.states:
                self.of(kind)

    def of(self, kind: type[S]) -> S:
        """The state of this kind that an API's handlers share. Creates it if there is none yet."""
        if (found := self._states.get(kind)) is None:
            found = kind.create(self)
            self._states[kind] = found  # after those that it uses
        state: S = found
        return state

    def begin(self) -> None:
        for each in self._states.values():
            each.begin()

    async def close(self) -> None:
        """Closes the APIs' states, each before those that it uses."""
        for each in reversed(self._states.values()):
            await each.close()

    async def generate(
        self,
        exchange: Exchange,
        decode: Callable[[bytes], R],
        prepare: Callable[[R, Engine, str], PreparedRequest],
        prefix: str = "",
    ) -> None:
        """Answers a request by generating: `decode` makes a struct of its body, and `prepare` makes of that, an engine
        that serves its model, and the request's id, what is run. prefix: of the id."""

        def ready(body: bytes) -> PreparedRequest:
            request = decode(body)
            name = exchange.request_id(request.request_id)
            if self.refusing:
                raise self.stopping()
            return prepare(request, engine_for(self.pool, request.model), f"{prefix}{name}")

        await self.generator.answer(await exchange.prepare(ready), exchange)

    async def engine_for(self, model: str | None) -> Engine:
        """As the function of this name, after an unknown model was looked for. Raises ApiError."""

        async def found() -> Engine:
            return engine_for(self.pool, model)

        return await self.finder.twice(found)

    def check_accepting(self) -> None:
        """Raises ApiError (503) if the server accepts no new requests."""
        if self.refusing:
            raise self.stopping()

    def stopping(self) -> ApiError:
        """A 503 that says why the server ends."""
        if self.pool.dead.is_set():
            return why_unavailable(self.pool)
        return unavailable("the server is shutting down and takes no new requests", code="shutting_down")

    def publish_counts(self) -> None:
        """Copies the counts of the engine pool and the router to this process's page of metrics."""
        self.pages.set("tokens_after_disconnect", self.pool.num_late_tokens())
        for kind, counts in self.pool.router.counts().items():
            for reason, count in counts.items():
                self.pages.set(f"router_{kind}/{reason}", count)
