"""Passes a request's outputs from the client's event loop to another thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any

from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.client.client import RequestClient
from headrace.frontend.client.one_process import OneProcess
from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.outputs import RequestOutput

Put = Callable[[RequestOutput | BaseException | None], Any]
"""Receives a request's outputs one by one, then None at its end or the error that ended it."""

MOST_UNREAD = 8
"""Most outputs of one request that are queued for the reading thread."""


class SyncStream(OneProcess):
    """An iterator of outputs. Closing it aborts the request. Several threads that read it share its outputs."""

    def __init__(
        self, background: BackgroundLoop, client: RequestClient, request: CheckedRequest, owner: object
    ) -> None:
        """owner: kept while this stream is, as it closes the client when it is collected."""
        self._owner = owner
        self._outputs: queue.SimpleQueue[RequestOutput | BaseException | None] = queue.SimpleQueue()
        self._ended = False
        self._background = background
        # The pump refers to the queue and not to this object, so that this object can be collected, which aborts it.
        self._pump = Pump(background, client, self._outputs.put)
        self._pump.start(request)

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> RequestOutput:
        """Raises the error that ended the request."""
        if self._ended:
            raise StopIteration
        try:
            item = self._background.take(self._outputs)
        except BaseException:  # such as KeyboardInterrupt
            self.close()
            raise
        if isinstance(item, RequestOutput) and not self._ended:
            self._pump.taken()
            return item
        self._ended = True
        self._outputs.put(item)  # for other threads that wait
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def close(self) -> None:
        """Aborts the request if it still runs. May be called again."""
        self._ended = True
        self._pump.cancel()

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pump") and not self._ended:
            self.close()


class Pump:
    """Passes a request's outputs to another thread, at most MOST_UNREAD ahead of it.

    Tokens that arrive while that many are unread wait in the stream, which returns them as one larger output.
    """

    def __init__(self, background: BackgroundLoop, client: RequestClient, put: Put) -> None:
        self._background, self._client, self._put = background, client, put
        self._room = asyncio.Semaphore(MOST_UNREAD)
        self._task: asyncio.Task[None] | None = None

    def start(self, request: CheckedRequest) -> None:
        """Submits the request. Raises as `RequestClient.submit` does."""
        self._background.run(self._start(request))

    def taken(self) -> None:
        """Reports that the other thread has taken an output. Thread-safe."""
        self._background.call_soon(self._room.release)

    def cancel(self) -> None:
        """Aborts the request, if it still runs. Thread-safe."""
        if self._task is not None:
            self._background.call_soon(self._task.cancel)

    async def _start(self, request: CheckedRequest) -> None:
        stream = self._client.submit(request)
        self._task = asyncio.get_running_loop().create_task(self._run(stream))

    async def _run(self, stream: RequestStream) -> None:
        try:
            async for output in stream:
                self._put(output)
                await self._room.acquire()
            self._put(None)
        except asyncio.CancelledError:
            stream.abort()
            if stream.has_last_output:  # the reader lags behind, and the client is closed
                self._put(await anext(stream))
            self._put(stream.error)
        except BaseException as error:
            self._put(error)
        finally:
            stream.abort()
