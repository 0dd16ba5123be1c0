"""A request's outputs for a thread that is not the client's."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any

from headrace.frontend.api.outputs import RequestOutput
from headrace.frontend.api.prompts import Prompt
from headrace.frontend.api.sampling_params import SamplingParams
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.client.client import CoreClient

Put = Callable[[RequestOutput | BaseException | None], Any]
"""Takes a request's outputs as they come; then None at its end, or what ended it."""


class SyncStream:
    """An iterator of outputs, for one thread. Closing it aborts the request."""

    def __init__(
        self, background: BackgroundLoop, client: CoreClient, request: tuple[str, Prompt, SamplingParams, int]
    ) -> None:
        self._background = background
        self._outputs: queue.SimpleQueue[RequestOutput | BaseException | None] = queue.SimpleQueue()
        self._ended = False
        # The task knows the queue and not this object, so that forgetting this object ends the task.
        self._task: asyncio.Task[None] = background.run(start_pump(client, request, self._outputs.put))

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> RequestOutput:
        """Raises what ended the request."""
        if self._ended:
            raise StopIteration
        try:
            item = self._outputs.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if isinstance(item, RequestOutput):
            return item
        self._ended = True
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Aborts the request if it still runs. May be called again."""
        self._ended = True
        self._background.call_soon(self._task.cancel)

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_task") and not self._ended:
            self.close()


async def start_pump(
    client: CoreClient, request: tuple[str, Prompt, SamplingParams, int], put: Put
) -> asyncio.Task[None]:
    """Submits a request, and puts its outputs as they come; then None, or what ended it. Cancelling it aborts."""
    stream = client.submit(*request)

    async def pump() -> None:
        try:
            async for output in stream:
                put(output)
            put(None)
        except BaseException as error:
            put(None if isinstance(error, asyncio.CancelledError) else error)
        finally:
            client.abort_stream(stream)

    return asyncio.get_running_loop().create_task(pump())
