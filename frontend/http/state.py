"""What the handlers of one HTTP process share."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.frontend.http.chat_prompt import ChatPrompts
from headrace.frontend.http.decoding import RequestDecoder
from headrace.frontend.http.engines import EnginePool
from headrace.frontend.http.errors import unavailable
from headrace.frontend.http.events import KeepAlive
from headrace.frontend.http.generation import Generator
from headrace.frontend.http.large_bodies import LargeBodies
from headrace.frontend.http.metrics import Exposition, Pages
from headrace.frontend.http.options import ServeOptions

if TYPE_CHECKING:
    from headrace.frontend.http.routes import RouteSpec


class ServerState:
    """Made once by the process, before it serves."""

    def __init__(
        self,
        options: ServeOptions,
        pool: EnginePool,
        pages: Pages,
        *,
        keys: Sequence[str],
        template: str | None,
    ) -> None:
        """`keys` guard every route but health; `template` is the server's own chat template."""
        self.options, self.pool, self.pages = options, pool, pages
        self.keys = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
        self.decoder = RequestDecoder(strict=options.strict_requests)
        self.bodies = LargeBodies(options.max_body_bytes)
        self.chat_prompts = ChatPrompts(template, trusts_requests=options.trust_request_chat_template)
        self.exposition = Exposition(pages, pool, options.metrics_prefix)
        self.generator = Generator(
            KeepAlive(options.sse_keep_alive),
            options.request_timeout,
            pages,
        )
        self.routes: Sequence[RouteSpec] = ()
        """What is served; the application sets it."""
        self.draining = False
        """Set once the server has begun to stop: what runs goes on, nothing new is taken."""
        self.started_at = int(time.time())

    def check_accepting(self) -> None:
        """Raises ApiError when no new requests are taken."""
        if self.draining and self.pool.dead.is_set():
            raise self.pool.why_unavailable()
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", code="shutting_down")

    def publish_counts(self) -> None:
        """Brings this process's page up to date with what is counted elsewhere."""
        self.pages.set("tokens_after_disconnect", sum(engine.num_late_tokens() for engine in self.pool.engines))

    def tenant_of(self, key: bytes) -> str | None:
        """A name for the key's owner; None for a wrong key. Every key is compared, each in constant time."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.keys]
        return digest[:8].hex() if any(matches) else None
