"""The log's line for an HTTP request: what was asked by whom, how it ended, and what it took.

POST /v1/completions: done in 0.123 s, id=f00 client=127.0.0.1:40312 model=tiny prompt_tokens=3 output_tokens=16

A request for an adapter has `adapter=` behind the model.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.frontend.client.request_stream import RequestStream
from headrace.ipc.process.log import FIELDS, printable

if TYPE_CHECKING:
    from headrace.frontend.fleet.engine import Engine

logger = logging.getLogger(__name__)


class Runs(Protocol):
    """Requests that run on an engine for one HTTP request (`generation.PreparedRequest`)."""

    @property
    def engine(self) -> Engine: ...
    @property
    def streams(self) -> Sequence[RequestStream]: ...


class RequestLine:
    """What is known of one HTTP request for its line in the log."""

    def __init__(self) -> None:
        self._running: list[Runs] = []

    @classmethod
    def begin(cls) -> RequestLine:
        """The line of the HTTP request that this task handles: `note` adds to it."""
        line = cls()
        _CURRENT.set(line)
        return line

    def write(self, level: int, scope: Any, *, id: str, status: int, outcome: str, duration_s: float) -> None:
        """Logs the line. outcome: `done`, or how the request ended instead."""
        method, path = scope["method"], printable(scope["path"])
        client = scope.get("client")
        told: dict[str, Any] = {"id": printable(id), "client": f"{client[0]}:{client[1]}" if client else "local"}
        streams = [stream for each in self._running for stream in each.streams]
        if self._running:
            told["model"] = printable(self._running[0].engine.names[0])
            if adapters := dict.fromkeys(use.name for stream in streams for use in stream.prompt.adapters):
                told["adapter"] = printable(",".join(adapters))
            told["prompt_tokens"] = sum(len(stream.prompt.token_ids or ()) for stream in streams)
            # The tokens themselves may have been freed with the answer.
            counts = [max(stream.metrics.num_generation_tokens, stream.num_tokens) for stream in streams]
            told["output_tokens"] = sum(counts)
        written = " ".join(f"{name}={value}" for name, value in told.items())
        fields = {"method": method, "path": path, "status": status, "duration_s": round(duration_s, 6), **told}
        text = "%s %s: %s in %.3f s, %s"
        logger.log(level, text, method, path, printable(outcome), duration_s, written, extra={FIELDS: fields})

    def add(self, running: Runs) -> None:
        self._running.append(running)


_CURRENT: contextvars.ContextVar[RequestLine | None] = contextvars.ContextVar("request_line", default=None)


def note(running: Runs) -> None:
    """Adds what runs on an engine to the line of the HTTP request that this task handles, if it has one."""
    if (line := _CURRENT.get()) is not None:
        line.add(running)
