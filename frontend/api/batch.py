"""Many requests at once: submitted, waited for and given back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace.frontend.api.outputs import RequestOutput
from headrace.frontend.api.prompts import Prompt, check_request
from headrace.frontend.api.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.request import RequestStream
from headrace.ipc.failure import HeadraceError, InvalidRequestError, RequestFailedError

MAX_IN_FLIGHT = 8192
"""Requests of one batch at the core at once: enough to keep any engine full, and short of its queue's bound."""

OnDone = Callable[[RequestStream], None]


async def run_batch(
    client: CoreClient,
    requests: Sequence[tuple[str, Prompt, SamplingParams, int]],
    on_done: OnDone | None = None,
) -> list[RequestOutput]:
    """The final outputs of (id, prompt, params, priority), in order.

    `on_done` hears of each as it ends. The first error is raised at once, and the others are aborted; so they are
    when this is cancelled.
    """
    if not requests:
        return []
    room = asyncio.Semaphore(MAX_IN_FLIGHT)
    all_ended = asyncio.get_running_loop().create_future()
    num_left = len(requests)

    def ended(stream: RequestStream) -> None:
        nonlocal num_left
        num_left -= 1
        room.release()
        if on_done is not None and stream.error is None:
            on_done(stream)
        if not all_ended.done():
            if stream.error is not None:
                all_ended.set_exception(_naming(streams.index(stream), len(requests), stream.error))
            elif num_left == 0:
                all_ended.set_result(None)

    streams: list[RequestStream] = []
    try:
        for request_id, prompt, params, priority in requests:
            await room.acquire()
            if all_ended.done():
                break
            stream = client.submit(request_id, prompt, params, priority)
            stream.on_done = ended
            streams.append(stream)
        await all_ended
        return [await stream.final() for stream in streams]
    finally:
        for stream in streams:
            stream.on_done = None
            client.abort_stream(stream)


def _naming(index: int, count: int, error: HeadraceError) -> HeadraceError:
    """The error of one request, with its prompt's place among several."""
    if count == 1 or not isinstance(error, InvalidRequestError | RequestFailedError):
        return error
    named = type(error)(f"prompts[{index}]: {error}", failure=error.failure)
    named.__cause__ = error
    return named


def params_for(given: Any, default: SamplingParams, count: int, kind: RequestOutputKind) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts, as copies that give their outputs in this kind."""
    if given is None:
        given = default
    if isinstance(given, SamplingParams):
        return [_copy(given, kind)] * count
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams, or a list with one for each prompt, not {given!r:.100}"
        )
    if len(given) != count:
        raise InvalidRequestError(f"there are {count} prompts and {len(given)} sampling_params; give one for each")
    return [_copy(each, kind) for each in given]


def priorities_for(given: Any, count: int) -> list[int]:
    if given is None:
        return [0] * count
    if isinstance(given, int):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise InvalidRequestError(f"priority must be an integer, or a list with one for each of the {count} prompts")
    return list(given)


def check_batch(prompts: Sequence[Prompt], params: Sequence[SamplingParams], client: CoreClient) -> None:
    """Raises InvalidRequestError, naming the prompt, before any of the batch is submitted."""
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        try:
            check_request(prompt, each, client.welcome)
        except InvalidRequestError as error:
            if len(prompts) == 1:
                raise
            raise InvalidRequestError(f"prompts[{index}]: {error}") from error


def _copy(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    params = params.clone()
    params.output_kind = kind
    return params
