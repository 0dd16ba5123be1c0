"""A whole server in this process, so that tests can inspect its threads and its messages to the engine."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from fleet_parts import Session
from null_with_tokenizer import BACKEND, VOCAB_SIZE
from patience import wait_until

from headrace.core.engine.engine import EngineThread
from headrace.core.options.parsing import parse_options
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.server import HttpServer, listen, url_of
from headrace.frontend.http.server.metrics import Pages
from headrace.ipc.messages import AddPrompts, AddRequest, ClientMessage

START_TIMEOUT_S = 60.0
MODEL = "null"


class ServerHere(NamedTuple):
    url: str
    sent: list[ClientMessage]
    """The messages sent to the engine."""

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, verify=False)

    def requests(self) -> list[AddRequest]:
        found = list[AddRequest]()
        for message in self.sent:
            if isinstance(message, AddPrompts):
                found += message.requests()
            elif isinstance(message, AddRequest):
                found.append(message)
        return found


@contextmanager
def serving_here(
    options: ServeOptions | None = None,
    null_model: dict[str, Any] | None = None,
    *,
    logs_stats: bool = False,
    folder: Path | None = None,
    **engine_options: Any,
) -> Iterator[ServerHere]:
    """Runs a server with a null engine, or with the model of a folder. null_model: fields of NullModel; logs_stats:
    whether it logs the engine's load, as one of several processes does."""
    overrides = {"vocab_size": VOCAB_SIZE, **(null_model or {})}
    null = {"model": MODEL, "distributed_executor_backend": BACKEND, "hf_overrides": overrides}
    model = null if folder is None else {"model": str(folder)}
    engine = EngineThread(parse_options(**{**model, **engine_options}))
    options = options or ServeOptions(port=0)
    session, ready = _Watched(engine), threading.Event()
    sock = listen(options)
    server = HttpServer(options, sock, Pages())
    server.on_ready, server.logs_stats = ready.set, logs_stats
    url = url_of(options, sock)
    thread = threading.Thread(target=lambda: asyncio.run(server.run([session])), name="server's loop")
    with process_unchanged():
        thread.start()
        try:
            wait_until(lambda: ready.is_set() or not thread.is_alive(), START_TIMEOUT_S, "the server's start")
            assert ready.is_set(), "the server did not start"
            yield ServerHere(url, session.sent)
        finally:
            server.stop_threadsafe(0.0)
            thread.join(START_TIMEOUT_S)
            engine.stop()
            sock.close()


@contextmanager
def process_unchanged() -> Iterator[None]:
    """Undoes what a server changes of its process."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


class _Watched(Session):
    """A session that records the messages of its client."""

    def __init__(self, thread: EngineThread) -> None:
        super().__init__(thread)
        self.sent: list[ClientMessage] = []

    def heard_of_client(self, message: ClientMessage) -> None:
        self.sent.append(message)
