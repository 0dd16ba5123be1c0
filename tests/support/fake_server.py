"""An HTTP server with configurable behaviour, good or bad, for tests of the load generator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

Behaviour = Callable[["FakeServer", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeServer:
    """Serves on a loopback port from a separate thread. `arrivals_s`: the times at which requests were complete."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        """The heads of all POST requests."""
        self.arrivals_s: list[float] = []
        self.num_connections = 0
        self.everybody_is_here = asyncio.Event()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
                size = int(lengths[0].partition(":")[2]) if lengths else 0
                body = await reader.readexactly(size)
                if head.startswith("GET"):
                    await answer_json(writer, 200, {"data": [{"id": "fake"}]} if "/v1/models" in head else {})
                    continue
                self.heads.append(head)
                if "_profile HTTP" in head:
                    await answer_json(writer, 200, {})
                    continue
                self.arrivals_s.append(time.perf_counter())
                self.bodies.append(json.loads(body))
                await self._behaviour(self, writer, self.bodies[-1])
                if writer.is_closing():
                    return
        writer.close()


async def answer_json(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


async def stream(server: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """A correct streamed answer with the requested number of tokens."""
    writer.write(HEAD)
    is_chat = "messages" in body
    count = body["max_completion_tokens" if is_chat else "max_tokens"]
    if is_chat:
        writer.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for number in range(count):
        text = f"word{number} "
        writer.write(event({"choices": [{"delta": {"content": text}}]}) if is_chat else piece(text))
        await writer.drain()
    usage = {"prompt_tokens": 7, "completion_tokens": count}
    writer.write(chunk(b": a comment\n\n") + event({"choices": [], "usage": usage}) + event(b"[DONE]") + b"0\r\n\r\n")
    await writer.drain()


def refuse(status: int) -> Behaviour:
    async def behave(server: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await answer_json(writer, status, {"error": {"message": f"no, {status}"}})

    return behave


def send_and_close(data: bytes) -> Behaviour:
    async def behave(server: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return behave


def send_and_stall(data: bytes) -> Behaviour:
    async def behave(server: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.Event().wait()

    return behave


def answer_nobody_until(count: int) -> Behaviour:
    """An overloaded server: it answers no request before `count` requests are waiting at once."""

    async def behave(server: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if len(server.bodies) >= count:
            server.everybody_is_here.set()
        await server.everybody_is_here.wait()
        await stream(server, writer, body)

    return behave
