"""A request's outputs for a thread that is not the client's."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

from headrace.frontend.background import BackgroundLoop
from headrace.frontend.client import CoreClient
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.prompts import Prompt
from headrace.frontend.sampling_params import SamplingParams


class SyncStream:
    """An iterator of outputs, for one thread. Closing it aborts the request."""

    def __init__(
        self, background: BackgroundLoop, client: CoreClient, request: tuple[str, Prompt, SamplingParams, int]
    ) -> None:
        self._background = background
        self._outputs: queue.SimpleQueue[RequestOutput | BaseException | None] = queue.SimpleQueue()
        self._ended = False
        # The task knows the queue and not this object, so that forgetting this object ends the task.
        self._task: asyncio.Task[None] = background.run(_start(client, request, self._outputs))

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


async def _start(client: CoreClient, request: tuple[str, Prompt, SamplingParams, int], outputs: Any) -> Any:
    stream = client.submit(*request)

    async def pump() -> None:
        try:
            async for output in stream:
                outputs.put(output)
            outputs.put(None)
        except BaseException as error:
            outputs.put(None if isinstance(error, asyncio.CancelledError) else error)
        finally:
            client.abort_stream(stream)

    return asyncio.get_running_loop().create_task(pump())
