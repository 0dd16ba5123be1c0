"""Runs many requests at once: submits them, waits for them and returns their outputs in order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import heapq
import logging
import numbers
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.frontend.client.client import RequestClient
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.request.checks import CheckedRequest, check
from headrace.frontend.request.lists import elements, one_for_each
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import (
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    let_interrupts_pass,
)
from headrace.ipc.messages import Pool, Welcome
from headrace.ipc.process.log import Unfailing

logger = logging.getLogger(__name__)
MAX_IN_FLIGHT = 8192
"""Most requests of one batch that the core has at a time: enough to keep any engine busy, and below the bound of its
waiting queue."""
QUEUE_PATIENCE_S = 60.0
"""How long a batch waits for room in a queue that others have filled, once it has had some of its requests answered."""
_LONGEST_RETRY_S = 5.0

OnEnded = Callable[[RequestStream], None]
"""Called in the client's loop with each request that has ended well. Must not raise."""


def checked_requests(
    client: RequestClient,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | PoolingParams],
    priority: Any,
    ids: Iterator[str],
) -> list[CheckedRequest]:
    """The requests of a batch. Raises InvalidRequestError, with the prompt's index if there are several."""
    priorities = [0] * len(prompts) if priority is None else priorities_for(priority, len(prompts))
    requests, tasks = list[CheckedRequest](), dict[int, Pool]()
    for index, (prompt, each, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
        try:
            requests.append(check(next(ids), prompt, each, client, rank, tasks, other_names=ids))
        except InvalidRequestError as error:
            raise _naming(index, len(prompts), error) from error
    return requests


class RequestBatch(RequestListener):
    """Requests that run together. One that finds the queue full is sent again when another has ended."""

    def __init__(
        self, client: RequestClient, requests: Sequence[CheckedRequest], on_ended: OnEnded | None = None
    ) -> None:
        self._client, self._requests, self._on_ended = client, requests, on_ended
        self._waiting = list(range(len(requests)))  # a heap: the first of those that are to be sent (again)
        self._running: dict[RequestStream, int] = {}
        self._ended: list[RequestStream | None] = [None] * len(requests)
        self._num_ended = 0
        self._most_running = MAX_IN_FLIGHT
        """How many may run, as far as known: lowered to what the engine took, and raised again one by one."""
        self._retry_at_s: float | None = None
        """When to try again if none runs, because others fill the queue."""
        self._patience_ends_s: float | None = None
        self._error: HeadraceError | None = None
        self._news = asyncio.Event()

    async def run(self) -> list[Any]:
        """Their final outputs, in order.

        The first error of a request is raised at once. On an error or a cancellation, the remaining requests are
        aborted. If the engine takes fewer requests at a time than there are, the others follow in turn.
        """
        try:
            while self._num_ended < len(self._requests):
                self._send()
                if self._error is not None:
                    raise self._error
                await self._wait()
            outputs = []
            for stream in self._ended:
                assert stream is not None, "all have ended"
                outputs.append(await anext(stream))  # of a stream with a listener the last is the only one
            return outputs
        finally:
            for stream in self._running:
                stream.listener = None
                stream.abort()

    def abort(self) -> None:
        """Ends those that run with finish_reason `abort`."""
        for stream in list(self._running):
            stream.abort()

    def _send(self) -> None:
        """Submits as many as may run now."""
        if self._retry_at_s is not None:
            if not self._running and time.monotonic() < self._retry_at_s:
                return
            self._retry_at_s = None
        while self._waiting and len(self._running) < self._most_running and self._error is None:
            index = heapq.heappop(self._waiting)
            try:
                stream = self._client.submit(self._requests[index], self)
            except QueueFullError as error:
                self._refused(index, error)
                break
            self._running[stream] = index

    async def _wait(self) -> None:
        """Waits until a request has ended, or until it is time to try again."""
        timeout_s = None if self._retry_at_s is None else max(0.0, self._retry_at_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()

    def on_done(self, stream: RequestStream) -> None:
        index = self._running.pop(stream)
        self._news.set()
        if isinstance(stream.error, QueueFullError):
            self._refused(index, stream.error)
        elif stream.error is not None:
            self._error = self._error or _naming(index, len(self._requests), stream.error)
        else:
            self._ended[index] = stream
            self._num_ended += 1
            self._most_running = min(MAX_IN_FLIGHT, self._most_running + 1)
            self._patience_ends_s = None
            if self._on_ended is not None:
                self._on_ended(stream)

    def _refused(self, index: int, error: QueueFullError) -> None:
        """The queue is full: as many requests as run now fit into it. If none runs, others fill it."""
        heapq.heappush(self._waiting, index)
        self._most_running = max(1, len(self._running))
        if self._running:
            return
        now_s = time.monotonic()
        if self._patience_ends_s is None:
            self._patience_ends_s = now_s + QUEUE_PATIENCE_S
        retry_after_s = error.failure.retry_after_s if error.failure is not None else 1.0
        self._retry_at_s = now_s + min(retry_after_s, _LONGEST_RETRY_S)
        if not self._num_ended or self._retry_at_s > self._patience_ends_s:
            self._error = self._error or error


async def enqueue_requests(client: RequestClient, requests: Sequence[CheckedRequest]) -> list[RequestStream]:
    """Submits requests without waiting for their outputs. On an error none runs."""
    streams: list[RequestStream] = []
    try:
        for request in requests:
            streams.append(client.submit(request))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


async def finish_requests(
    streams: Sequence[RequestStream], on_ended: OnEnded = lambda stream: None
) -> list[RequestOutput]:
    """The final outputs of submitted requests, in order. Raises the first error, and aborts the other requests."""
    outputs = []
    try:
        for stream in streams:
            outputs.append(await stream.final())
            on_ended(stream)
    finally:
        for stream in streams:
            stream.abort()
    return outputs


class ProgressBar:
    """Shows how many requests have finished, and output tokens per second.

    The client's loop only counts (`add`). The bar, which may be the user's and may write to a terminal that is slow or
    gone, belongs to the thread that waits: it calls `show` now and then, and enters and leaves the context.
    """

    def __init__(self, total: int, shown: bool | Callable[..., Any]) -> None:
        self._total, self._shown = total, shown
        self._bar: Any = None
        self._began_s = time.time()
        self._num_tokens = 0
        self._ended: collections.deque[int] = collections.deque()  # tokens of requests that `show` has not counted
        self._lock = threading.RLock()
        """Held while the bar is used, by one of several threads that wait."""

    def __enter__(self) -> ProgressBar:
        """Raises the error of a user's function that should make the bar, unless it is one of output."""
        if callable(self._shown):
            with contextlib.suppress(OSError):
                self._bar = self._shown(**self._given)
            self._shown = False
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.show()
        if self._bar is not None:
            self._guarded(self._bar.close)

    def add(self, stream: RequestStream) -> None:
        """Counts a request that has ended. Thread-safe."""
        self._ended.append(stream.metrics.num_generation_tokens)

    def grow(self, count: int) -> None:
        """Counts on `count` more requests."""
        with self._lock:
            self._total += count
            if self._bar is not None:
                self._bar.total = self._total

    def show(self) -> None:
        """Shows what was counted."""
        with self._lock:
            self._show()

    def _show(self) -> None:
        if self._shown and self._bar is None and self._total:
            self._guarded(self._make)
        count = 0
        while self._ended:
            self._num_tokens += self._ended.popleft()
            count += 1
        if count and self._bar is not None:
            rate = self._num_tokens / max(1e-9, time.time() - self._began_s)
            self._guarded(self._bar.set_postfix_str, f"{rate:.1f} output tok/s", refresh=False)
            self.update(count)

    def update(self, count: int) -> None:
        with self._lock:
            if self._bar is not None:
                self._guarded(self._bar.update, count)

    @property
    def _given(self) -> dict[str, Any]:
        return {"total": self._total, "desc": "Processed prompts", "unit": "prompt", "dynamic_ncols": True}

    def _make(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(**self._given, file=Unfailing(sys.stderr))
        self._bar.start_t = self._began_s

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """A bar that fails, as when nobody reads standard error any more, is given up; the requests go on."""
        try:
            call(*args, **kwargs)
        except BaseException as error:
            let_interrupts_pass(error)
            with contextlib.suppress(Exception):  # logging itself raises if sys.stderr is closed
                logger.warning("the progress bar is disabled, as it failed: %s: %s", type(error).__name__, error)
            with contextlib.suppress(Exception):
                self._bar.disable = True  # so that it writes nothing when it is collected
            self._bar, self._shown = None, False


class SharedBar:
    """The progress bar of all threads that wait for one LLM at a time: each adds its requests to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: ProgressBar | None = None
        self._num_waiting = 0

    @contextlib.contextmanager
    def open(self, total: int, shown: bool | Callable[..., Any]) -> Iterator[ProgressBar]:
        """shown: False shows none; a function makes a bar for this thread's requests alone, and may raise."""
        if shown is not True:
            with ProgressBar(total, shown) as own:
                yield own
            return
        with self._lock:
            bar = self._bar = self._bar or ProgressBar(0, True).__enter__()
            bar.grow(total)
            self._num_waiting += 1
        try:
            yield bar
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._bar = None
                    bar.__exit__(None)


def _naming(index: int, count: int, error: HeadraceError) -> HeadraceError:
    """The error of one request, prefixed with its prompt's index if there are several."""
    if count == 1 or not isinstance(error, InvalidRequestError | RequestFailedError):
        return error
    named = type(error)(f"prompts[{index}]: {error}", failure=error.failure)
    named.__cause__ = error
    return named


def params_for(given: Any, welcome: Welcome, count: int, kind: RequestOutputKind) -> list[SamplingParams]:
    """One frozen SamplingParams of this output kind for each of `count` prompts, by default the engine's
    defaults. Raises InvalidRequestError."""
    if given is None:
        given = default_params(welcome)
    if isinstance(given, SamplingParams):
        return [given.frozen(kind)] * count
    return [each.frozen(kind) for each in one_for_each(given, SamplingParams, "sampling_params", count)]


def default_params(welcome: Welcome) -> SamplingParams:
    """vLLM's defaults, with the fields that the model's generation config sets."""
    fields: dict[str, Any] = {**welcome.generation_defaults}
    return SamplingParams(**fields)


def priorities_for(given: Any, count: int) -> Sequence[Any]:
    """One for each of `count` prompts, which `check` checks. Raises InvalidRequestError for another number of them."""
    if isinstance(given, numbers.Integral):
        return [given] * count
    several = elements(given)
    if several is None or len(several) != count:
        raise InvalidRequestError(f"priority must be an integer, or a list with one for each of the {count} prompts")
    return several
